from collections.abc import Iterator
from itertools import pairwise

from ...tolerances import STATE_AGAIN
from ...trace.events import RandomStream
from ..base import Evidence, Finding, Rule, some


class RandomNumbersRepeat(Rule):
    """Training draws new random numbers in each step.

    Why: an evaluation or a preview that seeds the default generator, to be comparable, sets it back
    for the training, too: after each one the same noise, dropout masks and shuffles follow, so that
    the model sees a few of them again and again.
    Wrong:
        torch.manual_seed(1234)  # in an evaluation
        noise = torch.randn(8, 2)
    Right:
        noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(1234))
    Fix: Give what must be comparable a `torch.Generator` of its own, or run it in `with
    torch.random.fork_rng():`.
    Source: law L8: the probe records the state of torch's default generator after each step, and
    the lines that set it.
    """

    reads = frozenset({"survey"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.survey or evidence.trained
        return "" if run.all(RandomStream) else "no step of an optimizer was seen"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.survey or evidence.trained
        for rank, trace in enumerate(run.traces):
            for visits in _visits(trace.of(RandomStream)):
                line, steps = visits[-1].at_line, some([str(record.step) for record in visits], 4)
                if line is not None:
                    same = (
                        f"on rank {rank} the default generator is in the same state after steps"
                        f" {steps}"
                    )
                    return self.failed(
                        f"{same} (expected: never again): this line sets it, other steps draw"
                        " from it",
                        line,
                    )
        made = max((len(trace.of(RandomStream)) for trace in run.traces), default=0)
        return self.passed(
            f"the default generator is never set back to the state after an earlier step, in {made}"
            " steps"
        )


def _visits(records: list[RandomStream]) -> Iterator[list[RandomStream]]:
    """The steps with which one state begins, for each that the script sets again and again, while
    other steps draw freely.
    """
    begins: dict[int, list[int]] = {}
    drew: set[int] = set()
    for number, (before, record) in enumerate(zip([None, *records], records, strict=False)):
        # A step that draws nothing leaves the state as it was: only steps that begin with another
        # state are visits of it.
        if before is None or before.state != record.state:
            begins.setdefault(record.state, []).append(number)
            if record.at_line is None:
                drew.add(number)
    for numbers in begins.values():
        gaps = [set(range(a + 1, b + 1)) for a, b in pairwise(numbers)]
        # An evaluation is no phase of the training: if it sets the state back, the second time
        # already repeats the training's numbers (exam round 3 h_05_diffusion_preview).
        enough = 2 if records[numbers[-1]].evaluating else STATE_AGAIN
        if len(numbers) >= enough and all(
            # Between two visits other steps must have drawn freely: a script that seeds each step
            # by its number sets the state on purpose.
            gap & drew and any(records[n].at_line for n in gap)
            for gap in gaps
        ):
            yield [records[number] for number in numbers]

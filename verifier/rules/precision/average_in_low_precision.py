from collections import defaultdict

from ...tolerances import MOST_LOST
from ...trace import Trace
from ...trace.events import Place, State
from ..base import Evidence, Finding, Rule, count, some


class AverageInLowPrecision(Rule):
    """An average of the weights is kept in float32.

    Why: an average with decay 0.99 moves by a hundredth of its distance to the weights. bfloat16
    has 8 bits: what is less than half a unit in its last place (1/512 of the value) is rounded
    away, so that most elements stay where they began. The loss does not show it, since the average
    is only evaluated and exported.
    Wrong:
        average = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach().to(torch.bfloat16), 0.01)
    Right:
        # float32, as the weights
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.01)
    Fix: Keep the average in float32 and cast a copy of it where it is used or written.
    Source: law L6: at each step the probe counts, for tensors of 16 bits that the loop holds under
    the name of a float32 parameter, the elements that a change has left as they were although they
    are more than two units in the last place apart from it.
    """

    explains = ("state-same-in-one-process",)

    def applies(self, evidence: Evidence) -> str:
        found = any(_lost(trace) for trace in evidence.trained.traces)
        return (
            "" if found else "no tensor of 16 bits that the loop holds follows a float32 parameter"
        )

    def judge(self, evidence: Evidence) -> Finding:
        followed: set[str] = set()
        for trace in evidence.trained.traces:
            changes = _lost(trace)
            followed |= changes.keys()
            stuck = {
                path: seen
                for path, seen in changes.items()
                if sum(s > MOST_LOST for s, _ in seen) > len(seen) // 2
            }
            # One change may be a first copy; two show that the tensor follows.
            if stuck and any(len(seen) > 1 for seen in stuck.values()):
                path, seen = max(stuck.items(), key=lambda item: max(share for share, _ in item[1]))
                share, line = max(seen, key=lambda one: one[0])
                text = (
                    f"{count(len(stuck), 'tensor')} of 16 bits ({some(sorted(stuck))}) cannot"
                    " follow the float32 weights"
                )
                lost = (
                    f"a change of `{path}` left {share:.0%} of the elements that it should move as"
                    f" they were (allowed: {MOST_LOST:.0%})"
                )
                return self.failed(f"{text}: {lost}", line, measured=share, limit=MOST_LOST)
        return self.passed(
            f"{count(len(followed), 'tensor')} of 16 bits followed float32 weights and moved with"
            " them"
        )


def _lost(trace: Trace) -> dict[str, list[tuple[float, Place | None]]]:
    """{path: for each change the share of the elements that it lost, and the line at which the next
    step began}.
    """
    found: dict[str, list[tuple[float, Place | None]]] = defaultdict(list)
    for record in trace.of(State):
        for path, held in record.values.items():
            if held.lost is not None:
                found[path].append((held.lost, record.at_line))
        for path, lost in record.frozen.items():
            found[path].append((lost, record.at_line))
    return dict(found)

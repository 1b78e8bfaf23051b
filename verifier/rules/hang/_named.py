"""Why ranks wait for one another, from the logs of what each rank has called."""

from typing import ClassVar

from ...analysis.divergence import Parting, fork, location, parting, place
from ...analysis.rank_guards import leaving_branch, loop_of, rank_guard, skipping_branch
from ...evidence import Evidence, Sources
from ...trace.events import Place, ProgressEvent
from ..base import Finding, Rule, Run

Named = tuple[str, str, Place]  # rule, message, the user's line


class HangRule(Rule):
    """One of the reasons why ranks wait for one another."""

    explains: ClassVar[tuple[str, ...]] = ("run-completes",)
    wants = "nothing"
    one_rank = "it waits for no other"

    def judge(self, evidence: Evidence) -> Finding:
        train = evidence.train
        for run in (train, evidence.resume, evidence.survey):
            part = parting(run)
            found = named(evidence.sources, part) if part is not None else None
            if run is not None and found is not None and found[0] == self.name:
                return self.failed(f"the {run.role} run stopped: {found[1]}", found[2])
        if train is None or train.steps() == 0 or not train.completed:
            what = (
                "did not complete"
                if train is not None and train.steps()
                else "made no optimizer step"
            )
            return self.unknown(f"the train run {what}, for another reason (see run-completes)")
        return self.foreseen(evidence.sources, train)

    def foreseen(self, sources: Sources, run: Run) -> Finding:
        """The finding on a run that was not stopped by this cause."""
        return self.passed("no run was stopped by this cause")


def named(sources: Sources, part: Parting) -> Named | None:
    """The rule that explains a parting, if one does."""
    return (
        _by_rank(sources, part)
        or _by_data(part)
        or _by_branch(sources, part)
        or _by_loop(sources, part)
    )


def _by_rank(sources: Sources, part: Parting) -> Named | None:
    """A rank is in a collective under a condition on the rank."""
    for event in part.events.values():
        # A step is no collective: a rank in one under a rank condition is not what the others wait
        # for.
        for frame in event.frames if event is not None and event.op != "step" else ():
            guard = rank_guard(sources, frame[0], frame[1])
            if event is not None and guard is not None:
                what = (
                    f"only some ranks call {event.op}, under `{guard.text}` (line {guard.line}):"
                    f" {part.text()}"
                )
                at = location((frame[0], guard.line, frame[2]))
                return "rank-conditional-collective", what, at
    return None


def _by_data(part: Parting) -> Named | None:
    """Some rank's loader has come to its end, and another's has not."""
    ends = [
        (rank, next((n for n in notes if n.op == "end of data"), None))
        for rank, notes in part.notes.items()
    ]
    done = [(rank, end) for rank, end in ends if end is not None]
    # If all loaders have ended, or none, uneven data are not the cause.
    if not done or len(done) == len(ends) or not done[0][1].frames:
        return None
    rank, end = done[0]
    batches = f"{end.value or 0} batch{'' if end.value == 1 else 'es'}"
    what = (
        f"the loader at {place(end)} ended on rank {rank} after {batches}, while other ranks have"
        " more"
    )
    return "uneven-batches-hang", f"{what}: {part.text()}", location(end.frames[0])


def _by_branch(sources: Sources, part: Parting) -> Named | None:
    """Between the last common event and the parting stands a branch that some ranks took."""
    first, second, *_ = [*part.events.values(), None]
    for missed in part.events.values():
        ways = _ways(part.before, missed)
        if part.before is None and first is not None and second is not None:
            ways = _begun_otherwise(first, second)
        for file, before, line, function in ways:
            if (branch := skipping_branch(sources, file, before, line)) is not None:
                return _took(branch.text, part, (file, branch.line, function))
    return None


def _ways(
    before: ProgressEvent | None, missed: ProgressEvent | None
) -> list[tuple[str, int | None, int, str]]:
    """(file, line before, line missed, function): where two events part, and in every function
    entered after that.
    """
    if before is None or missed is None or (at := fork(before, missed)) is None:
        return []
    (file, line, _), (_, target, function) = at
    inner = missed.frames[: missed.frames.index((file, target, function))]
    return [(file, line, target, function), *((f[0], None, f[1], f[2]) for f in reversed(inner))]


def _begun_otherwise(
    first: ProgressEvent, second: ProgressEvent
) -> list[tuple[str, int | None, int, str]]:
    """`_ways` to the first events of two ranks, which have none before: where they stand in one
    function (a resume in which each rank chooses how it loads; ServiceNow/Fast-LLM).
    """
    at = fork(first, second)
    if at is None:
        return []
    return [(file, None, line, function) for file, line, function in sorted(at, reverse=True)]


def _by_loop(sources: Sources, part: Parting) -> Named | None:
    """A rank has left a loop in which another one goes on."""
    for rank, inside in part.events.items():
        for file, line, function in inside.frames if inside is not None else ():
            if (loop := loop_of(sources, file, line)) is None:
                continue
            others = (r for r in part.events if r != rank)
            gone = next(
                (r for r in others if not _inside(part.events[r], file, loop, part, r)), None
            )
            if gone is None:
                continue
            if (branch := leaving_branch(sources, file, line)) is not None:
                return _took(branch.text, part, (file, branch.line, function))
            what = (
                f"rank {gone} has left the loop at line {loop[0]}, and rank {rank} is still in it:"
                f" {part.text()}"
            )
            return "uneven-batches-hang", what, location((file, loop[0], function))
    return None


def _inside(
    event: ProgressEvent | None, file: str, loop: tuple[int, int], part: Parting, rank: int
) -> bool:
    """Whether a rank is still in a loop: by the lines of its event, or because nothing shows that
    it has left.
    """
    if event is None:
        # A rank without an event is inside the loop unless it is known to have left: nothing else
        # shows it.
        return rank not in part.left
    return any(f[0] == file and loop[0] <= f[1] <= loop[1] for f in event.frames)


def _took(condition: str, part: Parting, frame: tuple[str, int, str]) -> Named:
    what = (
        f"some ranks took the branch `{condition}` (line {frame[1]}) and others did not:"
        f" {part.text()}"
    )
    return "rank-local-control-flow", what, location(frame)

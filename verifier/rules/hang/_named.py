"""Why ranks wait for one another, from the logs of what each rank has called."""

from __future__ import annotations

from ...analysis.branches import Branch, leaving_branch, loop_of, rank_guard, skipping_branch
from ...analysis.divergence import Parting, fork, location, parting, place
from ...analysis.wording import count
from ...evidence import Evidence, Sources
from ...finding import Finding
from ...trace import Run
from ...trace.events import Place, ProgressEvent
from ..base import Rule

Named = tuple[str, str, Place]  # rule, what is told, the user's line


def named(sources: Sources, part: Parting) -> Named | None:
    """The rule that explains a parting, if one does."""
    return _by_rank(sources, part) or _by_data(part) or _by_branch(sources, part) or _by_loop(sources, part)


def _by_rank(sources: Sources, part: Parting) -> Named | None:
    """A rank is in a collective that stands under a condition on the rank."""
    for rank, event in part.events.items():
        for frame in event.frames if event is not None and event.op != "step" else ():
            guard = rank_guard(sources, frame[0], frame[1])
            if event is not None and guard is not None:
                what = f"rank {rank} is in {event.op} under `{guard.text}` (line {guard.line}): {part.told()}"
                return "rank-conditional-collective", what, location(frame)
    return None


def _by_data(part: Parting) -> Named | None:
    """Some rank's loader has come to its end, and another's has not."""
    ends = {rank: [n for n in notes if n.op == "end of data"] for rank, notes in part.notes.items()}
    done = {rank: notes[0] for rank, notes in ends.items() if notes}
    if not done or len(done) == len(ends):
        return None
    rank, end = next(iter(done.items()))
    if not end.frames:
        return None
    what = f"the loader at {place(end)} ended on rank {rank} after {count(end.value or 0, 'batch').replace('batchs', 'batches')}, "
    return "uneven-batches-hang", f"{what}while other ranks have more: {part.told()}", location(end.frames[0])


def _by_branch(sources: Sources, part: Parting) -> Named | None:
    """Between the last common event and the parting stands a branch that some ranks took."""
    for missed in part.events.values():
        for other in part.events.values():
            if missed is other or missed is None or part.before is None:
                continue
            for file, before, line, function in _ways(part.before, missed):
                branch = skipping_branch(sources, file, before, line)
                if branch is not None:
                    return _took(branch, part, (file, branch.line, function))
    return None


def _ways(before: ProgressEvent, missed: ProgressEvent) -> list[tuple[str, int | None, int, str]]:
    """(file, line before, line missed, function): where the two events part, and in every function entered after that."""
    at = fork(before, missed)
    if at is None:
        return []
    (file, line, _), (_, target, function) = at
    inner = missed.frames[: missed.frames.index((file, target, function))]
    return [(file, line, target, function), *((f[0], None, f[1], f[2]) for f in reversed(inner))]


def _by_loop(sources: Sources, part: Parting) -> Named | None:
    """A rank has left a loop in which another one goes on."""
    for rank, inside in part.events.items():
        for frame in inside.frames if inside is not None else ():
            file, line, function = frame
            loop = loop_of(sources, file, line)
            gone = [
                r
                for r, e in part.events.items()
                if r != rank and loop is not None and not _inside(e, file, loop, part, r)
            ]
            if loop is None or not gone:
                continue
            if (branch := leaving_branch(sources, file, line)) is not None:
                return _took(branch, part, (file, branch.line, function))
            what = f"rank {gone[0]} has left the loop at line {loop[0]}, and rank {rank} goes on: {part.told()}"
            return "uneven-batches-hang", what, location((file, loop[0], function))
    return None


def _inside(event: ProgressEvent | None, file: str, loop: tuple[int, int], part: Parting, rank: int) -> bool:
    """Whether a rank is still in a loop: by the lines of its event, or because nothing says that it has left."""
    if event is None:
        return rank not in part.left
    return any(f[0] == file and loop[0] <= f[1] <= loop[1] for f in event.frames)


def _took(branch: Branch, part: Parting, frame: tuple[str, int, str]) -> Named:
    told = f"some ranks took the branch `{branch.text}` (line {branch.line}) and others did not: {part.told()}"
    return "rank-local-control-flow", told, location(frame)


class HangRule(Rule):
    """One of the reasons why ranks wait for one another."""

    wants = "nothing"

    def applies(self, evidence: Evidence) -> str:
        one = evidence.train is not None and evidence.train.world_size == 1
        return super().applies(evidence) or ("one rank waits for no other" if one else "")

    def judge(self, evidence: Evidence) -> Finding:
        for run in (evidence.train, evidence.resume):
            part = parting(run)
            if run is None or part is None:
                continue
            answer = named(evidence.sources, part)
            if answer is not None and answer[0] == self.name:
                return self.failed(f"the {run.role} run stopped: {answer[1]}", answer[2])
        if evidence.train is None or evidence.train.steps() == 0:
            return self.unknown("the train run made no step, for another reason")
        if not evidence.train.completed:
            return self.unknown("the train run did not complete, for another reason")
        return self.foreseen(evidence.sources, evidence.train)

    def foreseen(self, sources: Sources, run: Run) -> Finding:
        """What can be said of a run that was not stopped by it."""
        return self.passed("no run was stopped by it")

"""Where the ranks of a run that hung, or met in different collectives, took different ways: their logs, compared event by event."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..trace import Run
from ..trace.events import Place, ProgressEvent
from .root_cause import is_victim, own_frames

# Operations that the ranks may call at different lines: the root's side and the others'.
_ALIKE = {"broadcast", "scatter", "gather", "reduce", "broadcast_object_list", "scatter_object_list", "gather_object"}
_NOTES = ("data", "end of data")

Frame = tuple[str, int, str]


@dataclass(frozen=True)
class Parting:
    """The first event that the ranks do not share. `events`: of each rank, None if it came to no further one."""

    number: int  # from 1, counted in collectives and steps
    events: dict[int, ProgressEvent | None]
    before: ProgressEvent | None  # the last event that all shared
    notes: dict[int, list[ProgressEvent]] = field(default_factory=dict)  # what each rank's loaders did between the two
    left: frozenset[int] = frozenset()  # the ranks that had come to their end

    def told(self) -> str:
        """`rank 0 is in x at train.py:8, rank 1 in y at train.py:9`."""
        parts = []
        for rank, event in self.events.items():
            where = f"in {event.op} at {_way(event)}" if event else "nowhere further"
            parts.append(f"rank {rank} is {'at its end' if event is None and rank in self.left else where}")
        shown = parts if len(parts) <= 4 else [*parts[:4], f"{len(parts) - 4} more ranks"]
        return f"at their {_ordinal(self.number)} collective or step, {'; '.join(shown)}"


def parting(run: Run | None) -> Parting | None:
    """Where the ranks of a run parted, if it did not complete for want of a common collective."""
    if run is None or run.completed or len(run.progress) < 2 or not _stuck(run):
        return None
    logs = {rank: [*events, *_unheard(run, rank, events)] for rank, events in run.progress.items()}
    collectives = {rank: [e for e in events if e.op not in _NOTES] for rank, events in logs.items()}
    for at in range(max((len(m) for m in collectives.values()), default=0)):
        events = {rank: m[at] if at < len(m) else None for rank, m in collectives.items()}
        if _same(list(events.values())):
            continue
        notes = {rank: _notes(logs[rank], at) for rank in logs}
        first = next(iter(collectives.values()))
        left = frozenset(t.rank for t in run.traces if t.end is not None and t.end.how != "exception")
        return Parting(at + 1, events, first[at - 1] if at else None, notes, left)
    return None


def place(event: ProgressEvent) -> str:
    """`train.py:8`, the innermost line of the user's in an event."""
    return f"{Path(event.frames[0][0]).name}:{event.frames[0][1]}" if event.frames else "a library"


def _way(event: ProgressEvent) -> str:
    """`train.py:8 <- train.py:90`, the user's lines that led to an event, innermost first."""
    return " <- ".join(f"{Path(f[0]).name}:{f[1]}" for f in event.frames[:4]) or "a library"


def location(frame: Frame) -> Place:
    """A frame of an event as a finding's location; its code is filled in from the sources when all is judged."""
    file, line, function = frame
    return Place(file=file, line=line, function=function, code="")


def fork(a: ProgressEvent, b: ProgressEvent) -> tuple[Frame, Frame] | None:
    """The frames, outermost first, in which two events first stand at different lines of one function."""
    for first, second in zip(reversed(a.frames), reversed(b.frames), strict=False):
        if first != second:
            return (first, second) if first[0] == second[0] and first[2] == second[2] else None
    return None


def _stuck(run: Run) -> bool:
    """A time-out, gloo's abort on a mismatch, or ranks that only lost a peer which had left without an error."""
    if run.timed_out or any("collective mismatch" in text for text in run.stderr.values()):
        return True
    if any(e.code < 0 and not e.killed for e in run.ended):
        return False
    bad = [t for t in run.traces if t.end is not None and (t.end.how == "exception" or t.end.code != 0)]
    return bool(bad) and all(is_victim(t) for t in bad)


def _unheard(run: Run, rank: int, events: list[ProgressEvent]) -> list[ProgressEvent]:
    """A collective that was not logged (an implicit one of a DTensor), seen in the stack of a rank that waits in it."""
    frames, waits = own_frames(run.stacks.get(rank, "")) if run.timed_out else ([], False)
    chain = [(f.file, f.line, f.function) for f in frames]
    last = events[-1].frames if events else []
    if not waits or not chain or last == chain[-len(last) :]:
        return []
    return [ProgressEvent(op="a collective", frames=chain)]


def _same(events: list[ProgressEvent | None]) -> bool:
    first = events[0]
    if first is None or any(e is None for e in events):
        return False
    ops = {e.op for e in events if e is not None}
    if len(ops) == 1 and first.op in _ALIKE:
        return True
    return len(ops) == 1 and all(e is not None and e.frames == first.frames for e in events)


def _notes(log: list[ProgressEvent], at: int) -> list[ProgressEvent]:
    """What a rank's loaders did between its collectives `at - 1` and `at` (from 0)."""
    count, found = 0, []
    for event in log:
        if event.op in _NOTES:
            if count == at:
                found.append(event)
        else:
            count += 1
    return found


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"

"""Where the ranks of a run that hung, or met in different collectives, diverged: their logs,
compared event by event.
"""

import re
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from ..trace import Run
from ..trace.events import Place, ProgressEvent
from .root_cause import is_victim, own_frames

# What gloo says where two ranks meet in different collectives, or in one of different sizes.
_MISMATCH = re.compile(r"collective mismatch|op\.preamble\.length")
# Operations that the ranks may call at different lines: the root's side and the others'. Root and
# others may call these at different lines (`if rank == 0: scatter(...) else: scatter(...)`) and
# still meet.
_ALIKE = {
    "broadcast",
    "scatter",
    "gather",
    "reduce",
    "broadcast_object_list",
    "scatter_object_list",
    "gather_object",
}
# Events of loaders are local: they explain a parting, they are no place to wait.
_NOTES = ("data", "end of data")

Frame = tuple[str, int, str]


@dataclass(frozen=True)
class Parting:
    """The first event that the ranks do not share.

    `events`: that of each rank, None if it reached no further one.
    """

    number: int  # from 1, counted in collectives and steps
    events: dict[int, ProgressEvent | None]
    before: ProgressEvent | None  # the last event that all shared
    # what each rank's loaders did between the two
    notes: dict[int, list[ProgressEvent]] = field(default_factory=dict)
    left: frozenset[int] = frozenset()  # the ranks that had ended without an exception

    def text(self) -> str:
        """`rank 0 is in x at train.py:8, rank 1 in y at train.py:9`."""
        shown = [self._position(rank) for rank in self.events][:3]
        if len(self.events) > 3:
            shown.append(f"{len(self.events) - 3} more ranks")
        return f"at collective or step number {self.number}, {'; '.join(shown)}"

    def _position(self, rank: int) -> str:
        if (event := self.events[rank]) is not None:
            return f"rank {rank} is in {event.op} at {_calls(event) or 'a library'}"
        return (
            f"rank {rank} {'had ended' if rank in self.left else 'reached no further collective'}"
        )


def parting(run: Run | None) -> Parting | None:
    """Where the ranks of a run diverged, if it did not complete because they reached no common
    collective.
    """
    if run is None or run.completed or len(run.progress) < 2 or not is_stuck(run):
        return None
    logs = {rank: [*events, *_unlogged(run, rank, events)] for rank, events in run.progress.items()}
    collectives = {rank: [e for e in events if e.op not in _NOTES] for rank, events in logs.items()}
    before = None
    for at, row in enumerate(zip_longest(*collectives.values())):
        if not _same(row):
            notes = {rank: _notes(log, at) for rank, log in logs.items()}
            left = frozenset(
                t.rank for t in run.traces if t.end is not None and t.end.how != "exception"
            )
            return Parting(at + 1, dict(zip(collectives, row, strict=True)), before, notes, left)
        before = row[0]
    return None


def _calls(event: ProgressEvent) -> str:
    """`train.py:8 <- :21`: the user's lines, innermost first; a file is named where it changes."""
    lines = list(dict.fromkeys((Path(file).name, line) for file, line, _ in event.frames))[:3]
    before = ["", *(name for name, _ in lines)]
    pairs = zip(lines, before, strict=False)
    return " <- ".join(f"{name if name != last else ''}:{line}" for (name, line), last in pairs)


def place(event: ProgressEvent) -> str:
    """`train.py:8`, the user's innermost line in an event."""
    return f"{Path(event.frames[0][0]).name}:{event.frames[0][1]}" if event.frames else "a library"


def location(frame: Frame) -> Place:
    """A frame of an event as a finding's location; its code is filled in from the sources after
    judging.
    """
    file, line, function = frame
    return Place(file=file, line=line, function=function, code="")


def fork(a: ProgressEvent, b: ProgressEvent) -> tuple[Frame, Frame] | None:
    """The frames, outermost first, in which two events first stand at different lines of one
    function.
    """
    for first, second in zip(reversed(a.frames), reversed(b.frames), strict=False):
        if first != second:
            return (first, second) if first[0] == second[0] and first[2] == second[2] else None
    return None


def is_stuck(run: Run) -> bool:
    """A time-out, gloo's abort on a mismatch, or ranks that only lost a peer which ended without an
    error.
    """
    # Ranks that were going on when their time was over have not parted: the signal came to one of
    # them first (speculators: a handler of SIGTERM that raises).
    if run.going_on:
        return False
    if run.timed_out or any(_MISMATCH.search(text) for text in run.stderr.values()):
        return True
    # A rank that a signal ended is the cause itself: the others only lost it.
    if any(e.code < 0 and not e.killed for e in run.ended):
        return False
    bad = [
        t for t in run.traces if t.end is not None and (t.end.how == "exception" or t.end.code != 0)
    ]
    # A rank that raised an error of its own explains the run: no parting of the ranks is looked
    # for.
    return bool(bad) and all(is_victim(t) for t in bad)


def _unlogged(run: Run, rank: int, events: list[ProgressEvent]) -> list[ProgressEvent]:
    """A collective that is not in the log (an implicit one of a DTensor), from the stack of a rank
    that waits in it.
    """
    frames, waits = own_frames(run.stacks.get(rank, "")) if run.timed_out else ([], False)
    chain = [(f.file, f.line, f.function) for f in frames]
    last = events[-1].frames if events else []
    # Collectives that a DTensor makes implicitly are in no log: taken from the stack, unless the
    # last event is that call.
    if not waits or not chain or last == chain[-len(last) :]:
        return []
    return [ProgressEvent(op="a collective", frames=chain)]


def _same(events: tuple[ProgressEvent | None, ...]) -> bool:
    first = events[0]
    if first is None or any(e is None or e.op != first.op for e in events):
        return False
    return first.op in _ALIKE or all(e is not None and e.frames == first.frames for e in events)


def _notes(log: list[ProgressEvent], at: int) -> list[ProgressEvent]:
    """What a rank's loaders did between its collectives `at - 1` and `at` (from 0)."""
    collectives = [-1, *(k for k, event in enumerate(log) if event.op not in _NOTES), len(log)]
    return log[collectives[at] + 1 : collectives[at + 1]] if at + 1 < len(collectives) else []

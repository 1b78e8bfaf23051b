"""Collectives to which the ranks of a run brought different sizes, so that they hang or abort."""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ..evidence import Sources
from ..trace import Run
from ..trace.events import CollectiveCall, Place
from .divergence import is_stuck
from .syntax import assigned_at

Value = int | list[int]


@dataclass(frozen=True)
class Sizes:
    """The first call in which what one rank gives is not what another takes."""

    op: str
    giver: int  # ranks
    taker: int
    gives: int  # elements
    takes: int
    call: CollectiveCall  # of the giver
    differ: tuple[tuple[int, str, Value, Value], ...]  # (frame, name, the giver's, the taker's)

    def text(self) -> str:
        """What each rank brings, and the values from which it may follow."""
        what = (
            f"in {self.op} at {_at(self.call.frames[0])} rank {self.giver} gives"
            f" {self.gives:,} elements, where rank {self.taker} takes {self.takes:,}"
        )
        values = [
            f"`{name}` is {_said(mine)} and {_said(theirs)} (line {self.call.frames[frame][1]})"
            for frame, name, mine, theirs in self._telling()
        ]
        return f"{what}: {', '.join(values)}" if values else what

    def place(self, sources: Sources) -> Place:
        """Where the number that differs is set: the line to edit; else the call."""
        for frame, name, mine, _ in self._telling():
            file, line, function = self.call.frames[frame]
            tree = sources.tree(file)
            before = [at for at in assigned_at(tree, function, name) if at <= line]
            if type(mine) is int and before:
                return Place(file=file, line=before[-1], function=function, code="")
        file, line, function = self.call.frames[0]
        return Place(file=file, line=line, function=function, code="")

    def _telling(self) -> list[tuple[int, str, Value, Value]]:
        """The innermost number, and the outermost tensor, that differ."""
        numbers = [one for one in self.differ if type(one[2]) is int]
        tensors = [one for one in self.differ if type(one[2]) is not int]
        return [*numbers[:1], *tensors[-1:]]


def sizes_apart(run: Run | None) -> Sizes | None:
    """The first call of a run that stopped in which the ranks' sizes do not fit."""
    if run is None or run.completed or not is_stuck(run):
        return None
    groups = {tuple(call.ranks) for calls in run.calls.values() for call in calls}
    for group in sorted(groups):
        numbered = {
            rank: {c.number: c for c in run.calls.get(rank, ()) if tuple(c.ranks) == group}
            for rank in group
        }
        for number in sorted({n for calls in numbered.values() for n in calls}):
            made = {rank: calls[number] for rank, calls in numbered.items() if number in calls}
            if (found := _apart(group, made)) is not None:
                return found
    return None


def _apart(group: tuple[int, ...], made: dict[int, CollectiveCall]) -> Sizes | None:
    if len({call.op for call in made.values()}) != 1:
        return None
    for one, other in combinations(made, 2):
        for giver, taker in ((one, other), (other, one)):
            mine, theirs = made[giver], made[taker]
            gives = mine.gives[group.index(taker)]
            takes = theirs.takes[group.index(giver)]
            if gives != takes and mine.frames:
                differ = _differing(mine, theirs, giver, taker)
                return Sizes(mine.op, giver, taker, gives, takes, mine, differ)
    return None


def _differing(
    mine: CollectiveCall, theirs: CollectiveCall, giver: int, taker: int
) -> tuple[tuple[int, str, Value, Value], ...]:
    """The variables of the same frames that differ, innermost first; no rank numbers."""
    if mine.frames != theirs.frames:
        return ()
    return tuple(
        (at, name, value, other[name])
        for at, (own, other) in enumerate(zip(mine.values, theirs.values, strict=False))
        for name, value in own.items()
        if name in other
        and other[name] != value
        and type(other[name]) is type(value)
        and (value, other[name]) != (giver, taker)
    )


def _at(frame: tuple[str, int, str]) -> str:
    return f"{Path(frame[0]).name}:{frame[1]}"


def _said(value: Value) -> str:
    return str(value) if isinstance(value, int) else "x".join(map(str, value)) or "one number"

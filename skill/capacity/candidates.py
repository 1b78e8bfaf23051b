"""Which of many combinations of settings are tried: the given one, each change of it alone,
then those that promise most. Where the given one does not fit, the combinations that need least
come first, and what fits of them is where the changes start from.

What a combination promises follows from the changes alone, by factors, from the nearest combination
that was tried. It only decides the order: no figure that is shown comes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from ...verifier.analysis.capacity import RESERVE, SHARDED, STATE
from ...verifier.analysis.settings_search import (
    ALLOWANCE,
    EXPANDABLE,
    YES,
    Candidate,
    frontier,
    recommended,
)

KEPT = (
    SHARDED,
    "gradients",
    STATE,
)  # kinds of memory that the mesh decides, not the batch
Choice = Mapping[str, Any]
Measure = Callable[[Sequence[Choice]], Sequence[Candidate | None]]  # None: the time was up
Point = tuple[int, ...]  # the position of each knob


@dataclass(frozen=True)
class Knob:
    """One setting and its values, the given one first."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Promise:
    """What a combination is expected to need."""

    kept: float
    other: float
    cost: tuple[float, ...]

    @property
    def memory(self) -> float:
        return self.kept + self.other + RESERVE

    def times(self, before: Promise, after: Promise) -> Promise:
        """With the change that leads from one to the other."""
        cost = zip(self.cost, before.cost, after.cost, strict=True)
        return Promise(
            _scaled(self.kept, before.kept, after.kept),
            _scaled(self.other, before.other, after.other),
            tuple(_scaled(*three) for three in cost),
        )


@dataclass
class Search:
    """The combinations of these knobs.

    `last`: a knob that is tried beside others only if nothing else fits `memory`. `extremes`: what
    needs least, tried one after the other, until one fits, where the given one does not. `given`:
    that one, if it was tried before.
    """

    knobs: Sequence[Knob]
    measure: Measure
    most: int
    at_once: int
    memory: int | None = None
    last: str = ""
    extremes: Sequence[Choice] = ()
    given: Candidate | None = None
    done: dict[Point, Candidate] = field(default_factory=dict)
    last_too: bool = False

    @property
    def possible(self) -> int:
        """The number of all combinations."""
        return prod(len(knob.values) for knob in self.knobs)

    def run(self) -> list[Candidate]:
        """Those that were tried, the given one first."""
        given = (0,) * len(self.knobs)
        if self.given is not None:
            self.done[given] = self.given
        everything = list(product(*(range(len(knob.values)) for knob in self.knobs)))
        if len(everything) <= self.most and not self.last:
            self._do(everything)
            return list(self.done.values())
        self._do([given])
        origin = self._origin(given)
        self._do(list(self._alone(origin)))
        for _ in range(self.most):
            due = self._next(everything, origin)
            if not due or not self._do(due):
                break
        return list(self.done.values())

    def _origin(self, given: Point) -> Point:
        """Where changes start from: the given choice, or the first of the extremes that fits."""
        if self.memory is None or given not in self.done or _fits(self.done[given]):
            return given
        for extreme in self.extremes:
            point = tuple(
                knob.values.index(extreme[knob.name]) if knob.name in extreme else 0
                for knob in self.knobs
            )
            self._do([point])
            if point in self.done and _fits(self.done[point]):
                return point
        return given

    def _do(self, points: Sequence[Point]) -> int:
        """Try them, as far as number and time allow; how many were."""
        points = [point for point in points if point not in self.done][: self.most - len(self.done)]
        found = self.measure([self.choice(point) for point in points]) if points else []
        new = {point: one for point, one in zip(points, found, strict=True) if one is not None}
        self.done |= new
        return len(new)

    def choice(self, point: Point) -> dict[str, Any]:
        """The values of a combination."""
        return {
            knob.name: knob.values[position]
            for knob, position in zip(self.knobs, point, strict=True)
        }

    def _alone(self, origin: Point) -> Iterator[Point]:
        for number, knob in enumerate(self.knobs):
            for position in range(len(knob.values)):
                if position != origin[number]:
                    yield (*origin[:number], position, *origin[number + 1 :])

    def _next(self, everything: Sequence[Point], origin: Point) -> list[Point]:
        """What promises to fit and to be faster than all that does, then what promises to be on the
        frontier.
        """
        if origin not in self.done or self.done[origin].measured is None:
            return []
        found = list(self.done.values())
        promised = {
            p: one for p in self._open(everything) if (one := self._promise(p, origin)) is not None
        }
        front = frontier(found)
        leaner = [
            p for p, one in promised.items() if not any(_beats(other, one) for other in front)
        ]
        leaner.sort(key=lambda p: promised[p].memory)
        if self.memory is None:
            return leaner[: self.at_once]
        best, room = recommended(found), self.memory / (1 + ALLOWANCE)
        faster = [
            p
            for p, one in promised.items()
            if one.memory <= room and (best is None or one.cost < best.cost())
        ]
        faster.sort(key=lambda p: (promised[p].cost, promised[p].memory))
        if best is None and not faster:
            least = min(one.memory for one in found if one.measured is not None)
            leanest = [p for p, one in promised.items() if one.memory < least]
            if leanest or self.last_too or not self.last:
                return sorted(leanest, key=lambda p: promised[p].memory)[: self.at_once]
            self.last_too = True
            return self._next(everything, origin)
        leaner = [p for p in leaner if promised[p].memory <= self.memory]
        half = max(1, self.at_once // 2)
        return list(dict.fromkeys([*faster[:half], *leaner, *faster[half:]]))[: self.at_once]

    def _open(self, everything: Sequence[Point]) -> list[Point]:
        """What may be tried yet."""
        last = next(
            (
                n
                for n, knob in enumerate(self.knobs)
                if knob.name == self.last and not self.last_too
            ),
            None,
        )
        return [
            point
            for point in everything
            if point not in self.done and (last is None or not point[last])
        ]

    def _promise(self, point: Point, origin: Point) -> Promise | None:
        """From the nearest combination that was tried, by the changes alone; None if one of
        these is not possible.
        """
        singles = {}
        for number, position in enumerate(point):
            for one in {position, origin[number]}:
                alone = self.done.get((*origin[:number], one, *origin[number + 1 :]))
                if alone is None or alone.measured is None:
                    return None
                singles[number, one] = _seen(alone)
        known = [p for p, one in self.done.items() if one.measured is not None]
        near = max(known, key=lambda p: sum(a == b for a, b in zip(p, point, strict=True)))
        found = _seen(self.done[near])
        for number, (old, new) in enumerate(zip(near, point, strict=True)):
            if old != new:
                before = self.done.get((*origin[:number], old, *origin[number + 1 :]))
                if before is None or before.measured is None:
                    return None
                found = found.times(_seen(before), singles[number, new])
        return found


def _fits(one: Candidate) -> bool:
    return one.fits(ALLOWANCE) in (YES, EXPANDABLE)


def _seen(one: Candidate) -> Promise:
    found = one.measured
    assert found is not None and found.highest is not None, "only of a candidate that was measured"
    kept = sum(found.highest.kinds.get(kind, 0) for kind in KEPT)
    return Promise(kept, one.memory - RESERVE - kept, one.cost())


def _scaled(value: float, before: float, after: float) -> float:
    return value * after / before if before else value + after


def _beats(one: Candidate, promise: Promise) -> bool:
    return one.memory <= promise.memory and one.cost() <= promise.cost

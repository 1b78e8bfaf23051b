"""Settings that change no mathematics, compared: memory of a rank against the least time of a step,
or what stands for it.

Without the rates of a GPU there is no time: what a step recomputes, and the bytes that it sends,
are compared as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..trace.events import CapacityRecord, Collective, ModuleFlops
from .capacity import CapacityPlan
from .roofline import GRADIENTS, PARAMETERS, Bound

ALLOWANCE = 0.05  # of what a rank needs, that a device must have beside it
CLOSE = 0.05  # of a bound: which of two settings that are nearer is faster, it does not say
DIGITS = 2  # of a bound: times that differ by less are equal
YES, EXPANDABLE, NO = "yes", "expandable", "no"


@dataclass(frozen=True)
class Candidate:
    """One choice of settings.

    `settings`: the keys and values that differ from what was given; {} for that itself.
    """

    settings: Mapping[str, str]
    found: CapacityPlan | None = None  # None: not tried
    bound: Bound | None = None
    offload: bool = False  # weights, gradients and optimizer state are on the host
    refused: str = ""  # why there is none

    @property
    def measured(self) -> CapacityPlan | None:
        """The capacity run, if it shows what a step needs."""
        found = self.found
        whole = (
            found is not None
            and found.trouble is None
            and found.record is not None
            and found.record.steps > 1
        )
        return found if whole and found is not None and found.highest is not None else None

    @property
    def last(self) -> bool:
        """Whether it is for where nothing else fits: without rates, what offload copies is compared
        with nothing.
        """
        return self.offload and self.bound is None

    @property
    def memory(self) -> int:
        """Bytes of the device, with `expandable_segments:True`: settings are not compared by what
        holes between blocks waste.
        """
        return self.measured.expandable if self.measured is not None else 0

    @property
    def record(self) -> CapacityRecord:
        found = self.measured
        assert found is not None and found.record is not None, (
            "only of a candidate that was measured"
        )
        return found.record

    @property
    def recomputed(self) -> int:
        """FLOPs of a step that activation checkpointing adds."""
        return sum(one.recompute for one in self.record.flops.values())

    @property
    def waited(self) -> int:
        """Bytes of collectives whose result the next operator needs, such as those of tensor
        parallelism.
        """
        return _bytes(
            one for one in _sent(self.record) if one.purpose not in (PARAMETERS, GRADIENTS)
        )

    @property
    def sent(self) -> int:
        """Bytes of all collectives of a step."""
        return _bytes(_sent(self.record))

    def cost(self) -> tuple[float, ...]:
        """What is compared beside memory, most important first.

        Of equal times, the one with less traffic and work beside it is better.
        """
        if self.bound is None:
            return (_rough(self.waited), _rough(self.recomputed), _rough(self.sent))
        least = self.bound
        return (
            _rough(least.step),
            _rough(least.link + least.network),
            _rough(least.compute + least.exposed),
        )

    def fits(self, allowance: float = 0.0) -> str | None:
        """YES, EXPANDABLE (only with `expandable_segments:True`) or NO; None if no memory of a
        device is known.
        """
        found = self.measured
        if found is None or found.memory is None:
            return None
        room = found.memory / (1 + allowance)
        return YES if found.needed <= room else EXPANDABLE if found.expandable <= room else NO


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats: it would need no more memory and no more time, and less of
    one. By memory.
    """
    front: list[Candidate] = []
    for one in sorted(_compared(candidates), key=lambda c: (c.memory, c.cost())):
        if not any(_covers(other, one) for other in front):
            front.append(one)
    return front


def ordered(candidates: Sequence[Candidate]) -> list[Candidate]:
    """All that were measured: what fits before what does not, then by cost and memory."""
    ranks = {YES: 0, None: 0, EXPANDABLE: 0, NO: 2}
    return sorted(
        (one for one in candidates if one.measured is not None),
        key=lambda c: (ranks[c.fits()] or int(c.last), c.cost(), c.offload, c.memory),
    )


def recommended(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest bound that fits with the allowance, by default or with expandable segments; of
    those close to it, what sends least.
    """
    fitting = [one for one in candidates if one.fits(ALLOWANCE) in (YES, EXPANDABLE)]
    best = min(fitting, key=lambda c: (c.last, c.cost(), c.offload, c.memory), default=None)
    if best is None or best.bound is None:
        return best
    most = best.bound.step * (1 + CLOSE)
    close = [one for one in fitting if one.bound is not None and one.bound.step <= most]
    return min(
        close, key=lambda c: (c.offload, _rough(c.waited), _rough(c.sent), c.cost(), c.memory)
    )


def smallest(candidates: Sequence[Candidate]) -> Candidate | None:
    """The one that needs the least memory."""
    return min(
        (one for one in candidates if one.measured is not None),
        key=lambda c: c.memory,
        default=None,
    )


def accumulated(record: CapacityRecord, times: int) -> CapacityRecord:
    """The record of steps with `times` forward passes, from that of steps with two.

    Of FLOPs and tokens, each pass has as many. Parameters are gathered in every pass after the
    first as in the last one; gradients are reduced in every pass before the last as in the first
    one. What is sent outside forward and backward, once a step.
    """
    if times == 2:
        return record
    return replace(
        record,
        tokens=record.tokens * times // 2,
        flops={name: _flops(one, times) for name, one in record.flops.items()},
        collectives=[
            replace(one, count=_count(one, times), in_first=one.in_first)
            for one in record.collectives
        ],
    )


def _flops(one: ModuleFlops, times: int) -> ModuleFlops:
    amounts = (one.forward, one.backward, one.recompute, one.masked)
    forward, backward, recompute, masked = (amount * times // 2 for amount in amounts)
    return replace(one, forward=forward, backward=backward, recompute=recompute, masked=masked)


def _count(one: Collective, times: int) -> int:
    first, last = one.in_first, one.count - one.in_first
    if one.phase not in ("forward", "backward"):
        return one.count
    return (times - 1) * first + last if one.purpose == GRADIENTS else first + (times - 1) * last


def _compared(candidates: Sequence[Candidate]) -> list[Candidate]:
    """What a frontier is made of."""
    return [one for one in candidates if one.measured is not None and not one.last]


def _covers(one: Candidate, other: Candidate) -> bool:
    """Whether `other` is no better in anything.

    With a bound the cost is one order, without it each part counts.
    """
    if one.memory > other.memory:
        return False
    if one.bound is not None and other.bound is not None:
        return one.cost() <= other.cost()
    return all(a <= b for a, b in zip(one.cost(), other.cost(), strict=True))


def _sent(record: CapacityRecord) -> list[Collective]:
    return [one for one in record.collectives if one.step == record.steps and one.group_size > 1]


def _bytes(collectives: Iterable[Collective]) -> int:
    return sum(one.count * one.bytes for one in collectives)


def _rough(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


@dataclass(frozen=True)
class Explored:
    """What an exploration has found, the given settings first."""

    candidates: tuple[Candidate, ...]
    possible: int  # combinations, of which `candidates` were tried
    memory: int | None
    gpu: str = ""
    out_of_time: bool = False

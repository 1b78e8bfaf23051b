"""From what a rehearsal has seen to its record: the kind of each storage, the peak of each phase, the course of memory over time."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from ...trace.events import Collective, Moment, ModuleFlops, Peak, Read, Rehearsal
from . import recorder as seen
from .recorder import Recorder

POINTS = 400  # of the course


def record(now: Recorder, world_size: int) -> Rehearsal:
    """The record of what was seen so far."""
    peaks, course = _followed(now)
    last = max((step for step in now.flops if step <= now.step), default=0)
    return Rehearsal(
        world_size=world_size,
        steps=now.step,
        peaks=peaks,
        course=course,
        collectives=[
            Collective(
                collective=one.kind,
                group=one.group,
                group_size=one.size,
                bytes=one.bytes,
                dtype=one.dtype,
                count=one.count,
                step=one.step,
                module=one.module,
                phase=one.phase,
            )
            for one in now.sent.values()
        ],
        flops={
            name: ModuleFlops(forward=one.forward, backward=one.backward, recompute=one.recompute, dtype=one.dtype)
            for name, one in now.flops.get(last, {}).items()
        },
        reads=[
            Read(what=key[0], count=count, in_step=key[3], synchronizes=syncs, at_line=place)
            for key, (count, place, syncs) in now.reads.items()
        ],
    )


def final_kinds(now: Recorder) -> list[str]:
    """The kind of each storage: what a forward has made is an activation if it is still there when a backward begins."""
    born, freed = [0] * len(now.kinds), [len(now.changes)] * len(now.kinds)
    met = [False] * len(now.kinds)
    for position, (number, change) in enumerate(now.changes):
        if not met[number]:
            met[number], born[number] = True, position
        if change < 0:
            freed[number] = position
    found = []
    for number, kind in enumerate(now.kinds):
        if kind in (seen.FORWARD, seen.RECOMPUTED):
            ends = now.backwards if kind == seen.FORWARD else now.recomputed
            after = bisect_right(ends, born[number])
            outlives = after < len(ends) and freed[number] >= ends[after]
            kind = seen.ACTIVATIONS if outlives else seen.TEMPORARY
        found.append(kind)
    return found


def _followed(now: Recorder) -> tuple[list[Peak], list[Moment]]:
    kinds = final_kinds(now)
    bounds = [*now.phases[1:], (len(now.changes), "")]
    held: Counter[str] = Counter()
    rounded: Counter[int] = Counter()
    total, reserved, phase, at = 0, 0, 0, 0
    peaks: dict[str, Peak] = {}
    every = max(1, len(now.changes) // (POINTS // 2))
    course: list[Moment] = []
    highest: tuple[int, Counter[str]] | None = None
    sizes = [0] * len(kinds)
    blocks = 0

    def offer(position: int) -> None:
        name = now.phases[phase][1]
        old = peaks.get(name)
        if old is None or total > old.bytes:
            line, module = now.lines.get(position, (None, ""))
            peaks[name] = Peak(
                phase=name,
                bytes=total,
                allocator=blocks,
                kinds={k: v for k, v in held.items() if v},
                module=module,
                at_line=line,
            )

    for position, (number, change) in enumerate(now.changes):
        while phase + 1 < len(now.phases) and now.phases[phase + 1][0] <= position:
            phase += 1
            offer(now.phases[phase][0])
        total += change
        held[kinds[number]] += change
        before = sizes[number]
        sizes[number] = before + change
        blocks += _block(sizes[number]) - _block(before)
        if change > 0:
            offer(position)
        if highest is None or total > highest[0]:
            highest = (total, held.copy())
        if position % every == every - 1:
            course.append(
                Moment(phase=now.phases[phase][1], bytes=highest[0], kinds={k: v for k, v in highest[1].items() if v})
            )
            highest = None
    del bounds, rounded, reserved, at
    return list(peaks.values()), course


_SMALLEST = 512


def _block(size: int) -> int:
    """What CUDA's caching allocator gives for a request: a multiple of 512 bytes."""
    return -(-size // _SMALLEST) * _SMALLEST

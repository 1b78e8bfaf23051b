"""From what a capacity run has seen to its record: the kind of each storage, peaks by phase, and
the course of memory over time.
"""

from __future__ import annotations

import resource
import sys
from bisect import bisect_right
from collections import Counter
from dataclasses import replace

from ...trace.events import CapacityRecord, Collective, ModuleFlops, Moment, Peak, Read
from . import recorder as seen
from .allocator import Allocator
from .recorder import Recorder

POINTS = 400  # of the course
_UNIT = 1 if sys.platform == "darwin" else 1024


def record(now: Recorder, world_size: int) -> CapacityRecord:
    """The record of what was seen so far."""
    peaks, course = _followed(now)
    # the script may have updated its weights itself since the last forward
    steps = now.step if now.updated and not now.optimized else now.whole
    last = max((step for step in now.flops if 0 < step <= steps), default=0)
    counted = now.flops[last] if last else {}
    return CapacityRecord(
        world_size=world_size,
        steps=steps,
        mesh=now.mesh,
        mesh_ranks=now.mesh_ranks,
        mesh_line=now.mesh_line,
        parameters=now.parameters,
        tokens=now.tokens[last],
        moved=now.moved[last],
        host_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT,
        peaks=peaks,
        course=course,
        collectives=[Collective(**vars(one)) for one in now.sent.values()],
        flops={name: ModuleFlops(**vars(one)) for name, one in counted.items()},
        reads=[
            Read(what=key[0], count=count, in_step=key[3], synchronizes=syncs, at_line=place)
            for key, (count, place, syncs) in now.reads.items()
        ],
    )


def final_kinds(now: Recorder) -> list[str]:
    """The kind of each storage: what a forward has made is an activation if it is still there when
    a backward begins.
    """
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
    """The peak of each phase, and the course."""
    kinds, sizes = final_kinds(now), [0] * len(now.kinds)
    held: Counter[str] = Counter()
    allocators = Allocator(expandable=False), Allocator(expandable=True)
    peaks: dict[str, Peak] = {}
    course: list[Moment] = []
    highest: tuple[int, Counter[str]] = 0, Counter()
    every = max(1, -(-len(now.changes) // POINTS))
    phases, total = now.phases, 0
    phase = 0
    for position, (number, change) in enumerate(now.changes):
        if phase + 1 < len(phases) and phases[phase + 1][0] <= position:
            phase += 1
            _raise(peaks, now, phases[phase], total, held)
        total += change
        held[kinds[number]] += change
        sizes[number] += change
        for allocator in allocators:
            allocator.resized(number, sizes[number], now.streams[position])
        name = phases[phase][1]
        if change > 0:
            _raise(peaks, now, (position, name), total, held)
        peaks[name] = replace(
            peaks[name], reserved=allocators[0].reserved, expandable=allocators[1].reserved
        )
        if total >= highest[0]:
            highest = total, held.copy()
        if position % every == every - 1:
            course.append(Moment(phase=name, bytes=highest[0], kinds=_positive(highest[1])))
            highest = 0, Counter()
    return list(peaks.values()), course


def _raise(
    peaks: dict[str, Peak], now: Recorder, at: tuple[int, str], total: int, held: Counter[str]
) -> None:
    """Note a new peak of a phase."""
    position, name = at
    if name not in peaks or total > peaks[name].bytes:
        line, module = now.lines.get(position, (None, ""))
        peaks[name] = Peak(
            phase=name,
            bytes=total,
            reserved=0,
            expandable=0,
            kinds=_positive(held),
            module=module,
            at_line=line,
        )


def _positive(held: Counter[str]) -> dict[str, int]:
    return {kind: size for kind, size in held.items() if size}

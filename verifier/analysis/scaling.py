"""By which factor gradients are scaled between backward and the optimizer's step, as a clip by norm does it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..trace import Run, Sketch, difference
from ..trace.events import Step, Stress

SAME = 1e-3  # two factors that differ by less are one
_STRAIGHT = 1e-4  # of the norm: what is off a multiple of the gradient by more is not scaled as a whole


def scales(run: Run) -> dict[str, list[float]]:
    """{parameter: its factor on each rank}, of the step in which they differ most between ranks, else of the smallest factors."""
    found: dict[str, list[float]] = {}
    for records in _steps(run):
        now: dict[str, list[float]] = {}
        for record in records:
            for name, factor in _factors(record):
                now.setdefault(name, []).append(factor)
        for name, factors in now.items():
            old = found.get(name)
            if old is None or (not uneven(old) and (uneven(factors) or max(factors) < max(old))):
                found[name] = factors
    return found


def stressed_scales(records: list[Stress]) -> dict[str, list[float]]:
    """The same, from what each rank made of huge gradients."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, (bb, bs, ss) in record.products.items():
            if bb > 0.0 and bs * bs >= (1.0 - 1e-6) * bb * ss > 0.0:
                found.setdefault(name, []).append(bs / bb)
    return found


def uneven(factors: list[float]) -> bool:
    """Whether ranks scale by different factors."""
    return max(factors) - min(factors) > SAME * max(factors)


def clip_was_reached(run: Run) -> bool:
    """Whether some gradient was scaled by a factor that depends on the step: not what a loss scale or a fixed division does."""
    seen: dict[tuple[int, str], list[float]] = {}
    for records in _steps(run):
        for rank, record in enumerate(records):
            for name, factor in _factors(record):
                seen.setdefault((rank, name), []).append(factor)
    return any(uneven(factors) for factors in seen.values())


def _steps(run: Run) -> Iterator[list[Step]]:
    for step in range(1, run.steps() + 1):
        yield run.at_step(Step, step)


def _factors(record: Step) -> Iterator[tuple[str, float]]:
    """(parameter, factor) of the gradients of one rank that are scaled as a whole in one step."""
    for name, before in record.grads.items():
        after: Sketch | None = record.grads_at_step.get(name)
        if not before or not after or before[0] <= 0.0 or after[0] <= 0.0:
            continue
        factor = math.sqrt(after[0] / before[0])
        if difference(after, [factor * x for x in before]) <= _STRAIGHT * math.sqrt(after[0]):
            yield name, factor

"""The factor by which gradients are scaled between backward and the optimizer step, as a clip by
norm does.
"""

import math
from collections.abc import Iterator

from ..tolerances import ABOUT_ONE_CLIP, NAMED_FACTOR, ONE_CLIP, STRAIGHT
from ..trace import Run, Sketch, difference
from ..trace.events import Step, Stress


def scales(run: Run) -> dict[str, list[float]]:
    """{parameter: its factor on each rank}, of the first step where they differ between ranks, else
    of the smallest factors.
    """
    found: dict[str, list[float]] = {}
    by_script = reduced_by_the_script(run)
    for step in range(1, run.steps() + 1):
        now: dict[str, list[float]] = {}
        for name, factor in (
            pair for record in run.at_step(Step, step) for pair in _factors(record)
        ):
            if name not in by_script:
                now.setdefault(name, []).append(factor)
        for name, factors in now.items():
            old = found.get(name)
            if old is None or (not uneven(old) and (uneven(factors) or max(factors) < max(old))):
                found[name] = factors
    return found


# Plain parameters beside shards are reduced by the script after backward: that change is no clip
# (exam round 1).
def reduced_by_the_script(run: Run) -> set[str]:
    """Plain parameters beside sharded ones: if their gradients are reduced at all, then after
    backward and by the script. With ranks beside the mesh of `fully_shard` (tensor parallelism) so
    are gradients that have another direction at the step, sums over these ranks.
    """
    plain = {name for name, entries in run.parameters.items() if not entries[0].sharded}
    found = plain if len(plain) < len(run.parameters) else set()
    return found | _turned(run) if len(run.data_ranks) < run.world_size else found


def _turned(run: Run) -> set[str]:
    """The parameters whose gradients the script turns between the first backward and the step."""
    before, after = run.whole(Step, "grads", 1), run.whole(Step, "grads_at_step", 1)
    found = set()
    for name, a in before.items():
        b = after.get(name)
        if a is not None and b is not None and a[0] > 0.0 and b[0] > 0.0:
            ratio = (b[0] / a[0]) ** 0.5
            if difference(b, [ratio * x for x in a]) > NAMED_FACTOR * b[0] ** 0.5:
                found.add(name)
    return found


def stressed_scales(records: list[Stress]) -> dict[str, list[float]]:
    """The same, from how each rank scaled huge gradients."""
    found: dict[str, list[float]] = {}
    for record in records:
        for name, (bb, bs, ss) in record.products.items():
            # Cauchy-Schwarz: equality holds only if the gradient was scaled as a whole.
            if bb > 0.0 and bs * bs >= (1.0 - 1e-6) * bb * ss > 0.0:
                found.setdefault(name, []).append(bs / bb)
    return found


def uneven(factors: list[float], limit: float = ABOUT_ONE_CLIP) -> bool:
    """Whether ranks scale by different factors."""
    return max(factors) - min(factors) > limit * max(factors)


def limit_between_ranks(scales: dict[str, list[float]]) -> float:
    """How far ranks may be apart: ABOUT_ONE_CLIP, or less where each rank scales all its parameters
    by one factor, and shows how exactly.
    """
    ranks = [
        [factors[rank] for factors in scales.values()]
        for rank in range(min(map(len, scales.values())))
    ]
    within = (
        max((max(own) - min(own)) / (max(own) or 1.0) for own in ranks)
        if len(scales) > 1
        else ABOUT_ONE_CLIP
    )
    return min(ABOUT_ONE_CLIP, max(ONE_CLIP, 20 * within))


def clip_was_reached(run: Run) -> bool:
    """Whether a gradient was scaled down by a factor that depends on the step, unlike a loss scale
    or a fixed division.
    """
    seen: dict[tuple[int, str], list[float]] = {}
    by_script = reduced_by_the_script(run)
    for step in range(1, run.steps() + 1):
        for rank, record in enumerate(run.at_step(Step, step)):
            for name, factor in _factors(record):
                if name not in by_script:
                    seen.setdefault((rank, name), []).append(factor)
    # A factor that is the same in each step is a loss scale or a fixed division, and one above 1 no
    # clip.
    return any(uneven(factors) and min(factors) < 1.0 - ABOUT_ONE_CLIP for factors in seen.values())


def _factors(record: Step) -> Iterator[tuple[str, float]]:
    """(parameter, factor) of the gradients of one rank that are scaled as a whole in one step."""
    for name, before in record.grads.items():
        after: Sketch | None = record.grads_at_step.get(name)
        if not before or not after or before[0] <= 0.0 or after[0] <= 0.0:
            continue
        factor = math.sqrt(after[0] / before[0])
        if difference(after, [factor * x for x in before]) <= STRAIGHT * math.sqrt(after[0]):
            yield name, factor

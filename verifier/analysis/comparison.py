"""How far two runs of the same script differ; how far they may, limits.py says.

Differences are relative to what a quantity can resolve: a loss to the largest loss of the run, a
gradient to the whole gradient.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..tolerances import FAINT
from ..trace import Run, Sketch, difference
from ..trace.events import Step, Stepped
from .root_cause import root_cause
from .scaling import reduced_by_the_script

Gradients = dict[str, Sketch | None]
MEASURES = ("loss", "gradient norm", "first gradient", "gradient at the step", "update")


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences by measure, and the size of the oracle's whole update.

    The loss and the gradient norm are compared over steps, the gradient after backward and where
    the optimizer finds it over parameters at step 1, the update over all steps.
    """

    measures: dict[str, float]
    update_size: float

    @property
    def finite(self) -> bool:
        """Whether no measure came from values that are not finite."""
        return not any(math.isnan(x) for x in self.measures.values())


def compare(run: Run, oracle: Run, until: int | None = None) -> Comparison:
    """Compare the steps that both runs made, up to step `until`, on the same weights and
    samples.
    """
    steps = range(1, min(run.steps(), oracle.steps(), until or run.steps()) + 1)
    update, size = update_apart(run, oracle, steps[-1])
    values = (
        _largest(loss_apart(run, oracle, step) for step in steps),
        _largest(norm_apart(run, oracle, step) for step in steps),
        _largest(gradients_apart(run, oracle).values()),
        _largest(gradients_apart(run, oracle, at_step=True).values()),
        update,
    )
    return Comparison(dict(zip(MEASURES, values, strict=True)), size)


def incomparable(run: Run, oracle: Run, role: str, label: str) -> str | None:
    """Why `oracle` cannot judge `run`; None if it can: it completed, from the same weights, on the
    same samples.
    """
    if reason := unlike(run, oracle, role, label):
        return reason
    # Other samples in the first step leave nothing to compare; inconclusive, since a design may
    # depend on the number of ranks.
    if parted(run, oracle) == 1:
        why = (
            "is not reproducible"
            if run.world_size == oracle.world_size
            else "depends on the number of ranks"
        )
        return f"the {role} run trained on other samples at step 1: the order of the data {why}"
    return None


def unlike(run: Run, oracle: Run, role: str, label: str) -> str:
    """Why `oracle` cannot judge `run`, whatever its samples are; "" if it completed, from the same
    weights.
    """
    if not oracle.completed:
        cause = root_cause(oracle)
        code = f" (`{cause.location.code}`)" if cause.location and cause.location.code else ""
        what = (
            "DDP cannot take the place of fully_shard here"
            if label == "DDP"
            else f"the {role} run did not complete"
        )
        return f"{what}: {cause.text}{code}; only the other oracles are compared"
    steps = min(run.steps(), oracle.steps())
    if steps == 0:
        return "no optimizer step was seen"
    other = next(
        # Runs that could not start from the same weights cannot be compared, whatever their numbers
        # are.
        (model.starting_point for model in oracle.models if model.starting_point != "loaded"),
        "",
    )
    return f"the {role} run could not start from the same weights: {other}" if other else ""


def parted(run: Run, oracle: Run) -> int | None:
    """The first step in which two runs were given other samples; None if there is none.

    Samples that a model has made (the fakes of a GAN) differ in their rounding: where all numbers
    agree, they are the same.
    """
    steps = range(1, min(run.steps(), oracle.steps()) + 1)
    return next((step for step in steps if not run.same_batch(step, oracle)), None)


def divided(run: Run, oracle: Run) -> set[str]:
    """The parameters of other shapes in two runs: one process holds the whole of those that the
    script divides over ranks itself (experts, a vocabulary). What they do to the losses and to the
    others is compared.
    """
    theirs = oracle.parameters
    return {
        name
        for name, entries in run.parameters.items()
        if name in theirs and theirs[name][0].shape != entries[0].shape
    }


def loss_apart(run: Run, oracle: Run, step: int, after: int = 0) -> float:
    """Difference of the objective of a step on the scale of the losses; `run` may be the oracle
    resumed after step `after`.
    """
    return _apart(run.objective(step), oracle.objective(after + step), oracle.loss_scale)


def norm_apart(run: Run, oracle: Run, step: int, after: int = 0) -> float:
    """Difference of the norm of the whole gradient after backward, on the scale of the largest of
    them.
    """
    late, parts = reduced_by_the_script(run), divided(run, oracle)
    mine, theirs = (
        _norm(_without(parts, gradients))
        for gradients in (_gradients(run, step, late), _gradients(oracle, after + step, late))
    )
    return _apart(mine, theirs, max(abs(theirs or 0.0), oracle.gradient_scale["grads"]))


def gradients_apart(run: Run, oracle: Run, at_step: bool = False) -> dict[str, float]:
    """{parameter: relative difference of its gradient in step 1}, after backward or where the
    optimizer finds it.
    """
    mine, theirs = first_gradients(run, oracle, at_step)
    first = math.sqrt(math.fsum(g[0] for g in theirs.values() if g is not None))
    total = max(first, oracle.gradient_scale["grads_at_step" if at_step else "grads"])
    found = {}
    for name in [*mine, *(n for n in theirs if n not in mine)]:
        a, b = mine.get(name), theirs.get(name)
        if a is not None and b is not None:
            found[name] = difference(a, b) / max(math.sqrt(b[0]), FAINT * total, 1e-30)
        elif a is not None or b is not None:
            size = math.sqrt((a or b or [0.0])[0])
            found[name] = min(1.0, size / max(FAINT * total, 1e-30)) if size == size else math.nan
    return found


def gradient_apart(run: Run, oracle: Run) -> tuple[float, list[str]]:
    """(relative difference of the whole first gradient, parameters by their part in it, largest
    first).
    """
    mine, theirs = first_gradients(run, oracle)
    parts = {
        n: difference(a, b)
        for n, b in theirs.items()
        if b is not None and (a := mine.get(n)) is not None
    }
    size = math.fsum(b[0] for b in theirs.values() if b is not None)
    apart = math.fsum(value**2 for value in parts.values())
    return _relative(apart, size), sorted(parts, key=lambda name: -parts[name])


def first_gradients(run: Run, oracle: Run, at_step: bool = False) -> tuple[Gradients, Gradients]:
    """The gradients of step 1 of both runs, as `gradients_apart` compares them."""
    late, parts = reduced_by_the_script(run), divided(run, oracle)
    mine, theirs = (
        one.whole(Step, "grads_at_step", 1) if at_step else _gradients(one, 1, late)
        for one in (run, oracle)
    )
    return _without(parts, mine), _without(parts, theirs)


def update_apart(run: Run, oracle: Run, step: int) -> tuple[float, float]:
    """(relative difference of all weight changes up to the end of `step`, size of the oracle's
    change).
    """
    mine, theirs = changes(run, step), changes(oracle, step)
    # of what rounding leaves of a sum that cancels, such as the gradient of a bias before a
    # softmax, Adam makes whole updates Adam makes whole updates of what rounding leaves of a
    # gradient that cancels (round 11 mc_01): left out if one run has any (exam r11
    # mc_01_twotower_init twin: item.down.bias, update off by 7.7e-05).
    chance = {n for n in run.faint.keys() & oracle.faint.keys() if run.faint[n] or oracle.faint[n]}
    chance |= divided(run, oracle)
    mine, theirs = (
        {n: change for n, change in one.items() if n not in chance} for one in (mine, theirs)
    )
    size = sum(length(change) ** 2 for change in theirs.values())
    apart = sum(difference(mine.get(name, [0.0] * len(b)), b) ** 2 for name, b in theirs.items())
    own = sum(length(change) ** 2 for change in mine.values())
    return _relative(own if size == 0.0 else apart, size), math.sqrt(size)


def without_gradients(run: Run) -> bool:
    """Whether no step has a gradient: the script changes its weights by losses alone."""
    return bool(run.traces) and not any(record.grads for record in run.traces[0].steps)


def _apart(a: float | None, b: float | None, scale: float) -> float:
    if a is None or b is None:
        # A loss or norm that only one run has is a difference; one that neither has is none
        # (test_a_gradient_against_none_is_a_difference).
        return 0.0 if a is b else math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
    # The scale is that of all losses of the run: relative to itself a loss of zero would differ by
    # any factor (test_a_loss_that_is_zero_but_for_rounding).
    return abs(a - b) / max(scale, 1e-12)


def _gradients(run: Run, step: int, late: set[str]) -> Gradients:
    """Every gradient of a step after the last backward, before any clipping; those of `late` at the
    optimizer step.
    """
    found = run.whole(Step, "grads", step)
    if late:
        at_step = run.whole(Step, "grads_at_step", step)
        found |= {name: at_step.get(name) for name in late}
    return found


def _without(names: set[str], gradients: Gradients) -> Gradients:
    return {name: value for name, value in gradients.items() if name not in names}


def _norm(gradients: Gradients) -> float | None:
    parts = [g[0] for g in gradients.values() if g is not None]
    return math.sqrt(math.fsum(parts)) if parts else None


def _largest(apart: Iterable[float]) -> float:
    """The largest difference; NaN counts as the largest."""
    return max(apart, key=lambda value: (math.isnan(value), value), default=0.0)


def _relative(apart: float, size: float) -> float:
    """The ratio of two lengths given by their squares; infinite if only `size` is 0."""
    return math.sqrt(apart / size) if size != 0.0 else (0.0 if apart == 0.0 else math.inf)


def length(change: Sketch) -> float:
    """The length of a change of weights."""
    return difference(change, [0.0] * len(change))


def changes(run: Run, step: int) -> dict[str, Sketch]:
    """{parameter: sketch of its change up to the end of `step`}."""
    return apart_by_name(run.whole(Step, "weights", 1), run.whole(Stepped, "weights", step))


def changes_between(run: Run, step: int) -> dict[str, Sketch]:
    """{parameter: sketch of its change after the optimizer step before `step`, until that of
    `step`}.
    """
    return apart_by_name(run.whole(Stepped, "weights", step - 1), run.whole(Step, "weights", step))


def apart_by_name(
    before: Mapping[str, Sketch | None], after: Mapping[str, Sketch | None]
) -> dict[str, Sketch]:
    """The differences of sketches; the first number of a sketch is not linear and is left at
    zero.
    """
    pairs = {
        name: (a, b)
        for name, a in before.items()
        if a is not None and (b := after.get(name)) is not None
    }
    return {
        name: [0.0, *(y - x for x, y in zip(a[1:], b[1:], strict=True))]
        for name, (a, b) in pairs.items()
    }

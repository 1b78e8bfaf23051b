"""How far two runs of the same script differ, and how far they may differ.

The limit is derived: the perturbed run repeats the reference run from weights one unit in the last
place away. What that changes is the noise of this script; the limit is a small multiple of it, plus
the rounding of a few additions in another order. Where the noise was not measured, only a
difference that no script's noise explains is a fault; one between the two limits is inconclusive.

Differences are relative to what a quantity can resolve: a loss to the largest loss of the run, a
gradient to the whole gradient.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..evidence import Evidence
from ..tolerances import CANCELLED, CLEARLY, FAINT, FLOOR, FROM_LOSSES, GROSS, MULTIPLE
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


@dataclass(frozen=True)
class Limits:
    """By measure, the difference up to which two runs agree (`allowed`) and above which they differ
    (`gross`).

    The two are equal where the noise of the script was measured; `underived` is why it was not.
    `noise` is that of the loss.
    """

    allowed: dict[str, float]
    gross: dict[str, float]
    noise: float
    underived: str = ""

    def agree(self, measures: Mapping[str, float]) -> bool:
        """Whether every measure is within what is allowed, or all but the loss: a script may scale
        its gradients after backward.
        """
        return self.over(measures) <= ({MEASURES[0]} if len(measures) == len(MEASURES) else set())

    def over(self, measures: Mapping[str, float]) -> set[str]:
        """The measures that are above what is allowed."""
        return {name for name, value in measures.items() if not value <= self.allowed[name]}

    def differ(self, measures: Mapping[str, float]) -> bool:
        """Whether a measure is beyond what any noise explains; a value that is not a number is."""
        return any(not value <= self.gross[name] for name, value in measures.items())


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


def agrees(evidence: Evidence, rule: str, run: Run, oracle: Run, role: str, label: str) -> bool:
    """Whether two runs from the same weights come to the same numbers in all steps, however their
    samples are cut into rows.
    """
    if not run.completed or unlike(run, oracle, role, label):
        return False
    found = compare(run, oracle)
    return found.finite and found.update_size > 0.0 and limits(evidence, rule).agree(found.measures)


def incomparable(run: Run, oracle: Run, role: str, label: str) -> str | None:
    """Why `oracle` cannot judge `run`; None if it can: it completed, from the same weights, on the
    same samples.
    """
    if reason := unlike(run, oracle, role, label):
        return reason
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
        (model.starting_point for model in oracle.models if model.starting_point != "loaded"), ""
    )
    return f"the {role} run could not start from the same weights: {other}" if other else ""


def parted(run: Run, oracle: Run) -> int | None:
    """The first step in which two runs were given other samples; None if there is none.

    Samples that a model has made (the fakes of a GAN) differ in their rounding: where all numbers
    agree, they are the same.
    """
    steps = range(1, min(run.steps(), oracle.steps()) + 1)
    return next((step for step in steps if not run.same_batch(step, oracle)), None)


def loss_apart(run: Run, oracle: Run, step: int, after: int = 0) -> float:
    """Difference of the objective of a step on the scale of the losses; `run` may be the oracle
    resumed after step `after`.
    """
    return _apart(run.objective(step), oracle.objective(after + step), oracle.loss_scale)


def norm_apart(run: Run, oracle: Run, step: int, after: int = 0) -> float:
    """Difference of the norm of the whole gradient after backward, on the scale of the largest of
    them.
    """
    late = reduced_by_the_script(run)
    mine, theirs = _norm(_gradients(run, step, late)), _norm(_gradients(oracle, after + step, late))
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
    if at_step:
        return run.whole(Step, "grads_at_step", 1), oracle.whole(Step, "grads_at_step", 1)
    late = reduced_by_the_script(run)
    return _gradients(run, 1, late), _gradients(oracle, 1, late)


def update_apart(run: Run, oracle: Run, step: int) -> tuple[float, float]:
    """(relative difference of all weight changes up to the end of `step`, size of the oracle's
    change).
    """
    mine, theirs = changes(run, step), changes(oracle, step)
    # of what rounding leaves of a sum that cancels, such as the gradient of a bias before a
    # softmax, Adam makes whole updates
    chance = {n for n in run.faint.keys() & oracle.faint.keys() if run.faint[n] or oracle.faint[n]}
    mine, theirs = (
        {n: change for n, change in one.items() if n not in chance} for one in (mine, theirs)
    )
    size = sum(length(change) ** 2 for change in theirs.values())
    apart = sum(difference(mine.get(name, [0.0] * len(b)), b) ** 2 for name, b in theirs.items())
    own = sum(length(change) ** 2 for change in mine.values())
    return _relative(own if size == 0.0 else apart, size), math.sqrt(size)


def first_updates_apart(evidence: Evidence, rule: str) -> dict[str, tuple[float, float]]:
    """{parameter: (relative difference of its first update, allowed)}, those that are most apart
    first.

    Each parameter is judged by its own noise, since one that begins at zero may have a noise that
    hides all others in their sum. It differs if it does from DDP and from one process, both of
    which have its gradient.
    """
    run, perturbed, base = evidence.full_precision, evidence.perturbed, nudged(evidence)
    oracles = [
        one for one in (evidence.reference, evidence.single) if one is not None and one.completed
    ]
    if (
        run is None
        or perturbed is None
        or base is None
        or len(oracles) < 2
        or _unmeasured(evidence)
    ):
        return {}
    noise = _first_updates(perturbed, base)
    apart = [_first_updates(run, one) for one in oracles]
    same = [gradients_apart(run, one, at_step=True) for one in oracles]
    found = {}
    for name, moved in noise.items():
        allowed = evidence.times(rule) * (MULTIPLE * moved + CANCELLED * FLOOR)
        alike = all(each.get(name, math.inf) <= CANCELLED * FLOOR for each in same)
        least = min(each.get(name, 0.0) for each in apart)
        if alike and least > CLEARLY * allowed:
            found[name] = (least, allowed)
    return dict(sorted(found.items(), key=lambda one: -one[1][0] / one[1][1]))


def _first_updates(run: Run, oracle: Run) -> dict[str, float]:
    """{parameter: difference of its change in step 1, relative to that of the oracle}."""
    mine, theirs = changes(run, 1), changes(oracle, 1)
    return {
        n: difference(mine[n], b) / length(b)
        for n, b in theirs.items()
        if n in mine and length(b) > 0.0
    }


def limits(evidence: Evidence, rule: str) -> Limits:
    """How far two runs may differ for a rule, from the noise that the perturbed run has
    measured.
    """
    perturbed, base, why = evidence.perturbed, nudged(evidence), _unmeasured(evidence)
    noise = dict.fromkeys(MEASURES, 0.0)
    if base is not None and perturbed is not None and min(base.steps(), perturbed.steps()) > 0:
        noise = compare(perturbed, base).measures
    known = {name: value for name, value in noise.items() if math.isfinite(value)}
    if not why and len(known) < len(noise):
        why = (
            "the perturbed run has no finite difference of"
            f" {', '.join(name for name in noise if name not in known)}"
        )
    allowed = {
        name: evidence.times(rule) * (MULTIPLE * known.get(name, 0.0) + FLOOR) for name in MEASURES
    }
    allowed |= {
        name: max(allowed[name], CANCELLED * FLOOR * evidence.times(rule)) for name in MEASURES[2:4]
    }
    if evidence.full_precision is not None and without_gradients(evidence.full_precision):
        allowed["update"] = max(allowed["update"], FROM_LOSSES * evidence.times(rule))
    gross = {name: max(value, GROSS) if why else value for name, value in allowed.items()}
    return Limits(allowed, gross, known.get("loss", 0.0), why)


def times_noise(evidence: Evidence, run: Run, oracle: Run) -> float:
    """How many times the noise of the script, which one perturbed run has measured, two runs are
    apart that agree; at least 1.
    """
    perturbed, base = evidence.perturbed, nudged(evidence)
    if perturbed is None or base is None:
        return 1.0
    noise, apart = compare(perturbed, base).measures, compare(run, oracle).measures
    return max(
        1.0,
        *(apart[name] / max(noise[name], FLOOR) for name in ("loss", "gradient norm", "update")),
    )


def without_gradients(run: Run) -> bool:
    """Whether no step has a gradient: the script changes its weights by losses alone."""
    return bool(run.traces) and not any(record.grads for record in run.traces[0].steps)


def _unmeasured(evidence: Evidence) -> str:
    """Why the noise of the script is not known; "" if the perturbed run has measured it."""
    perturbed, base = evidence.perturbed, nudged(evidence)
    if perturbed is None:
        return evidence.missing.get("perturbed", "no perturbed run was made")
    if base is None:
        return "the run that the perturbed run repeats did not complete"
    if perturbed.steps() < base.steps():
        cause = "" if perturbed.completed else f": {root_cause(perturbed).text}"
        return f"the perturbed run made {perturbed.steps()} of {base.steps()} steps{cause}"
    return ""


def undecided(name: str, value: float, found: Limits) -> str:
    """Why a difference between the two limits is inconclusive."""
    below = f"without a measured noise of the script a difference below {GROSS:.0%} is not judged"
    return f"{name} differs by {value:.2g}; {below}: {found.underived}"


def nudged(evidence: Evidence) -> Run | None:
    """The run that the perturbed run repeats from weights one unit in the last place away."""
    perturbed = evidence.perturbed
    runs = [
        run for run in (evidence.reference, evidence.single) if run is not None and run.completed
    ]
    return next(
        (run for run in runs if perturbed is not None and run.world_size == perturbed.world_size),
        None,
    )


def _apart(a: float | None, b: float | None, scale: float) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
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
    """{parameter: sketch of its change behind the optimizer step before `step`, until that of
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

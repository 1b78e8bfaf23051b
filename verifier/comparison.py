"""How far two runs of the same script are apart, and how far they may be.

The limit is derived: the envelope run is the reference run once more from weights one unit in the last place away. What that moves
is the noise of this script; the limit is a small multiple of it, plus the rounding of a few additions in another order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .evidence import Evidence
from .trace import Run, Sketch, difference

MULTIPLE = 16.0
FLOOR = 2.0**-18  # 32 units in the last place of float32
Gradients = dict[str, Sketch | None]
SMALL = 1e-3  # gradients far below the whole gradient are compared on this share of it


@dataclass(frozen=True)
class Comparison:
    """Largest relative differences: `loss` and `grad_norm` over steps, `gradient` over parameters at step 1, `update` in all."""

    loss: float
    grad_norm: float
    gradient: float
    update: float
    update_size: float
    worst: str

    @property
    def finite(self) -> bool:
        """Whether no measure came from values that are not finite."""
        return not any(math.isnan(x) for x in (self.loss, self.grad_norm, self.gradient, self.update))


def compare(run: Run, oracle: Run) -> Comparison:
    """Compare the steps that both runs made, on the same weights and samples."""
    steps = range(1, min(run.steps(), oracle.steps()) + 1)
    late = _reduced_by_the_script(run)
    loss = max((_apart(run.objective(s), oracle.objective(s)) for s in steps), default=0.0)
    norm = max(
        (_apart(_norm(_gradients(run, s, late)), _norm(_gradients(oracle, s, late))) for s in steps), default=0.0
    )
    gradient, worst = _first_gradients(_gradients(run, 1, late), _gradients(oracle, 1, late))
    update, size = _updates(run, oracle, steps[-1])
    return Comparison(loss, norm, gradient, update, size, worst)


def limits(evidence: Evidence) -> dict[str, float]:
    """{measure: largest allowed difference}, and "envelope": the relative loss difference of the envelope run."""
    reference, envelope = evidence.reference, evidence.envelope
    noise = Comparison(0.0, 0.0, 0.0, 0.0, 0.0, "")
    if reference is not None and envelope is not None and min(reference.steps(), envelope.steps()) > 0:
        noise = compare(envelope, reference)
    noise_of = {
        "loss": noise.loss,
        "gradient norm": noise.grad_norm,
        "first gradient": noise.gradient,
        "update": noise.update,
    }
    allowed = {name: MULTIPLE * (value if math.isfinite(value) else 0.0) + FLOOR for name, value in noise_of.items()}
    return {**allowed, "envelope": noise.loss if math.isfinite(noise.loss) else 0.0}


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
    return abs(a - b) / max(abs(b), 1e-12)


def _reduced_by_the_script(run: Run) -> set[str]:
    """Plain parameters beside sharded ones: if their gradients are reduced at all, then after backward and by the script."""
    plain = {name for name, entries in run.parameters.items() if not entries[0]["sharded"]}
    return plain if len(plain) < len(run.parameters) else set()


def _gradients(run: Run, step: int, late: set[str]) -> Gradients:
    """Every gradient of a step after the last backward, before any clipping; those of `late` at the optimizer step."""
    found = run.whole("step", "grads", step)
    if late:
        at_step = run.whole("step", "grads_at_step", step)
        found |= {name: at_step.get(name) for name in late}
    return found


def _norm(gradients: Gradients) -> float | None:
    parts = [g[0] for g in gradients.values() if g is not None]
    return math.sqrt(math.fsum(parts)) if parts else None


def _first_gradients(mine: Gradients, theirs: Gradients) -> tuple[float, str]:
    """(largest relative difference over parameters, its parameter)."""
    total = math.sqrt(math.fsum(g[0] for g in theirs.values() if g is not None))
    worst, name = 0.0, "none"
    for key in sorted(mine.keys() | theirs.keys()):
        a, b = mine.get(key), theirs.get(key)
        if a is None and b is None:
            continue
        if a is None or b is None:
            value = 1.0
            zero = (a or b or [0.0])[0] == 0.0
            value = 0.0 if zero else 1.0
        else:
            value = difference(a, b) / max(math.sqrt(b[0]), SMALL * total, 1e-30)
        if not value <= worst:
            worst, name = value, key
    return worst, name


def _updates(run: Run, oracle: Run, step: int) -> tuple[float, float]:
    """(relative difference of all weight changes up to the end of `step`, size of the oracle's change)."""
    mine, theirs = _change(run, step), _change(oracle, step)
    apart = size = 0.0
    for name, b in theirs.items():
        a = mine.get(name, [0.0] * len(b))
        apart += difference(a, b) ** 2
        size += difference(b, [0.0] * len(b)) ** 2
    own = math.fsum(difference(a, [0.0] * len(a)) ** 2 for a in mine.values())
    if size == 0.0:
        return (0.0 if own == 0.0 else math.inf), 0.0
    return math.sqrt(apart / size), math.sqrt(size)


def _change(run: Run, step: int) -> dict[str, Sketch]:
    """{parameter: sketch of its change}; the first number of a sketch is not linear and is left at zero."""
    before, after = run.whole("step", "weights", 1), run.whole("stepped", "weights", step)
    return {
        name: [0.0, *(y - x for x, y in zip(a[1:], b[1:], strict=True))]
        for name, a in before.items()
        if a is not None and (b := after.get(name)) is not None
    }

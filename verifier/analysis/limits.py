"""How far two runs of the same script may differ.

The limit is derived: the perturbed run repeats the reference run from weights one unit in the last
place away. What that changes is the noise of this script; the limit is a small multiple of it, plus
the rounding of a few additions in another order. Where the noise was not measured, only a
difference that no script's noise explains is a fault; one between the two limits is inconclusive.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..evidence import Evidence
from ..tolerances import CANCELLED, CLEARLY, FLOAT32, FLOOR, FROM_LOSSES, GROSS, MULTIPLE
from ..trace import Run, difference
from ..trace.events import Step
from .comparison import (
    MEASURES,
    changes,
    compare,
    gradients_apart,
    length,
    unlike,
    without_gradients,
)
from .root_cause import root_cause


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
        # A loss of another scale alone is no difference if gradients and updates agree: scripts
        # divide gradients after backward (exam r3 g_12_scale_after).
        return self.over(measures) <= ({MEASURES[0]} if len(measures) == len(MEASURES) else set())

    def over(self, measures: Mapping[str, float]) -> set[str]:
        """The measures that are above what is allowed."""
        return {name for name, value in measures.items() if not value <= self.allowed[name]}

    def differ(self, measures: Mapping[str, float]) -> bool:
        """Whether a measure is beyond what any noise explains; a value that is not a number is."""
        return any(not value <= self.gross[name] for name, value in measures.items())


def agrees(evidence: Evidence, rule: str, run: Run, oracle: Run, role: str, label: str) -> bool:
    """Whether two runs from the same weights come to the same numbers in all steps, however their
    samples are cut into rows.
    """
    if not run.completed or unlike(run, oracle, role, label):
        return False
    found = compare(run, oracle)
    return found.finite and found.update_size > 0.0 and limits(evidence, rule).agree(found.measures)


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
        # A single parameter's first update is a fault only if it differs from DDP and from one
        # process with the same gradients.
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
        # Only where the optimizer found the same gradient is a different first update the
        # optimizer's own arithmetic (exam round 8 (trust ratio of local shards)).
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
        # Single gradients may be sums that cancel; losses, norms and updates of all parameters are
        # not (exam r4 l_19_pcgrad_multitask: first gradient of depth.bias off by 1.1e-05).
        name: max(allowed[name], CANCELLED * FLOOR * evidence.times(rule))
        for name in MEASURES[2:4]
    }
    if evidence.full_precision is not None and without_gradients(evidence.full_precision):
        # Without gradients the update is made of losses: its limit is theirs, multiplied (zeroth
        # order (exam rounds 2-8; zoo/zeroth_order)).
        allowed["update"] = max(allowed["update"], FROM_LOSSES * evidence.times(rule))
    allowed["update"] = max(allowed["update"], _rounded_updates(evidence) * evidence.times(rule))
    # Where the noise is not known, what lies between the two limits is inconclusive, neither a pass
    # nor a fault (test_no_envelope).
    gross = {name: max(value, GROSS) if why else value for name, value in allowed.items()}
    return Limits(allowed, gross, known.get("loss", 0.0), why)


def _rounded_updates(evidence: Evidence) -> float:
    """How far rounding to float32 takes updates apart that differ by FLOOR: an element of a weight
    may be rounded to the one or the other side, which counts where the update is small beside the
    weight (the end of a schedule: exam round 14 ra_07_hybrid_nodes).
    """
    run = evidence.full_precision
    if run is None or not run.steps():
        return 0.0
    weights = run.whole(Step, "weights", 1).values()
    size = math.sqrt(sum(one[0] for one in weights if one is not None))  # sums of squares
    moved = math.sqrt(sum(length(one) ** 2 for one in changes(run, run.steps()).values()))
    return math.sqrt(FLOOR * FLOAT32 * size / moved) if moved > 0.0 else 0.0


def times_noise(evidence: Evidence, run: Run, oracle: Run) -> float:
    """How many times the noise of the script, which one perturbed run has measured, two runs are
    apart that agree; at least 1.
    """
    perturbed, base = evidence.perturbed, nudged(evidence)
    if perturbed is None or base is None:
        return 1.0
    # a script without a step of an optimizer has none to compare (exam round 13 qc_13_forward_only)
    if not all(one.steps() for one in (perturbed, base, run, oracle)):
        return 1.0
    noise, apart = compare(perturbed, base).measures, compare(run, oracle).measures
    return max(
        1.0,
        # LoRA with alpha 200 multiplies rounding: the end may be as many times its noise apart as
        # the compared steps, which agree.
        *(apart[name] / max(noise[name], FLOOR) for name in ("loss", "gradient norm", "update")),
    )


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

"""The runs of a verification as data: which runs are due, given the results of earlier ones.

Pure functions; nothing is run here, and nothing is judged.

A stage is a function from the settings, the evidence so far and what the rules find in it to the
runs that are due now. It is called until none is. `restart` says whether runs that have ended are
to be made again with other settings; `added` puts those that count into the evidence. The executor
sees only `PlannedRun`s.
"""

from collections.abc import Callable

from ..evidence import Evidence
from ..launch.planned import PlannedRun
from .faults import faults
from .followup_stages import Found, completed, endings, layers, perturbed, scaled, to_the_end
from .oracles import fallbacks, oracles, original
from .restarts import restart
from .results import added
from .settings import Settings
from .train import first, repeats, survey

__all__ = [
    "FIRST",
    "Found",
    "Settings",
    "Stage",
    "added",
    "completed",
    "endings",
    "faults",
    "original",
    "perturbed",
    "restart",
    "stages",
]

Plan = Callable[[Settings, Evidence], list[PlannedRun]]
Stage = Callable[[Settings, Evidence, Found], list[PlannedRun]]


def last(settings: Settings, evidence: Evidence, found: Found) -> list[PlannedRun]:
    """The measure of noise, which needs the reference, second looks, and what is left of the
    faults.
    """
    looks = (perturbed, endings, to_the_end, scaled, layers)
    due = [run for look in looks for run in look(settings, evidence, found)]
    return [*due, *faults(settings, evidence)]


def _of_runs_alone(plan: Plan) -> Stage:
    return lambda settings, evidence, found: plan(settings, evidence)


FIRST = _of_runs_alone(first)


def stages(tier: str) -> tuple[Stage, ...]:
    """The stages of a tier, in order."""
    if tier == "simulate":
        return (FIRST,)
    before, after = _of_runs_alone(survey), map(_of_runs_alone, (repeats, oracles, fallbacks))
    return (before, FIRST, *after, last)

"""The runs of a verification as data: which runs are due, given the results of earlier ones.

Pure functions; nothing is run here.

A stage is a function from the settings and the evidence so far to the runs that are due now. It is
called until none is. The executor sees only `PlannedRun`s.
"""

from collections.abc import Callable

from ..evidence import Evidence
from ..launch.planned import PlannedRun
from .faults import faults
from .followup_stages import NOT_QUICK, completed, endings, layers, perturbed, scaled, to_the_end
from .oracles import fallbacks, oracles, original
from .settings import QUICK, Settings
from .train import first, repeats, survey

__all__ = [
    "NOT_QUICK",
    "QUICK",
    "Settings",
    "completed",
    "endings",
    "faults",
    "first",
    "original",
    "perturbed",
    "stages",
]

Stage = Callable[[Settings, Evidence], list[PlannedRun]]


def last(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The measure of noise, which needs the reference, second looks, and what is left of the
    faults.
    """
    found = [
        run
        for look in (perturbed, endings, to_the_end, scaled, layers)
        for run in look(settings, evidence)
    ]
    return [*found, *faults(settings, evidence)]


def stages(tier: str) -> tuple[Stage, ...]:
    """The stages of a tier, in order."""
    return (first,) if tier == "simulate" else (survey, first, repeats, oracles, fallbacks, last)

"""Why the first runs are made again with other settings: what they recorded is not what was to be
compared.
"""

from collections.abc import Sequence
from dataclasses import replace

from ..analysis.platform import asks_for_cuda, shards_only_on_gpus
from ..analysis.steps_to_compare import own_steps, prepares_before_sharding, steps_without_backward
from ..evidence import Evidence
from ..trace import Run, Trace
from ..trace.roles import ROLES
from .settings import Settings


def restart(settings: Settings, evidence: Evidence, runs: Sequence[Run]) -> Settings | None:
    """The settings with which runs that have just ended are to be made again; None if they
    count.
    """
    if evidence.train is not None:
        return None
    trains = [run for run in runs if "train" in (run.role, ROLES[run.role].place)]
    return (
        _with_cuda_on_the_cpu(settings, evidence, runs)
        or _from_sharding_on(settings, trains)
        or _with_own_steps(settings, evidence, trains)
    )


def _with_cuda_on_the_cpu(
    settings: Settings, evidence: Evidence, runs: Sequence[Run]
) -> Settings | None:
    """Where the script asks for CUDA and there is none: a run that ended there, or that went
    another way, says nothing of it.
    """
    if settings.target.device != "auto" or settings.cuda_on_cpu or settings.gpus:
        return None
    asks = any(asks_for_cuda(run) or shards_only_on_gpus(run, evidence.sources) for run in runs)
    return replace(settings, cuda_on_cpu=True) if asks else None


def _from_sharding_on(settings: Settings, trains: Sequence[Run]) -> Settings | None:
    """Where the train run has recorded models as they were before the script sharded them."""
    if settings.from_sharding_on or not any(map(prepares_before_sharding, trains)):
        return None
    return replace(settings, from_sharding_on=True)


def _with_own_steps(
    settings: Settings, evidence: Evidence, trains: Sequence[Run]
) -> Settings | None:
    """Where the script updates its weights itself: its steps end elsewhere."""
    how = _ends_of_steps(settings, trains)
    if not how:
        return None
    target = settings.target
    chosen = not target.steps or evidence.survey is not None  # nobody asked for a number of steps
    if how == "forwards" and chosen:
        target = replace(target, steps=steps_without_backward(evidence))
    return replace(settings, target=target, own_steps=how)


def _ends_of_steps(settings: Settings, trains: Sequence[Run]) -> str:
    """Where the steps of the train run end, if it has to be made again for it; "each" if by their
    samples the ranks parted.
    """
    if settings.own_steps in ("backwards", "forwards"):
        apart = any(not run.completed or len({*map(_updates, run.traces)}) > 1 for run in trains)
        return "each" if apart else ""
    if settings.own_steps:
        return ""
    return next(filter(None, map(own_steps, trains)), "")


def _updates(trace: Trace) -> int:
    return len(trace.stepped)

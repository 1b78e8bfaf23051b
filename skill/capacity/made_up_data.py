"""The plan of a spec whose launch section names the device: the lines of `fsdp2 new`, and what
`fsdp2 spec check` refuses.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.config.devices import GIB
from ...verifier.errors import MachineRefuses, UserError
from ...verifier.isolation.leftovers import remove, temporary
from ..atomic_write import defer_signals
from ..output import log
from ..spec.crosschecks_size import device_memory, device_of
from ..spec.meshes import production

if TYPE_CHECKING:
    from ...verifier.analysis.capacity import CapacityPlan
    from ...verifier.analysis.roofline import Bound
    from ...verifier.analysis.settings_search import Explored
    from ...verifier.config.devices import Device
    from ..spec import Problem, Spec

SECONDS = 120.0  # for the plan, and again for what to set where it does not fit
TRIES = 10
KEYS = ("launch.device_memory", "launch.gpu", "launch.skypilot_accelerator")


@dataclass(frozen=True)
class Short:
    """The plan of a spec on the device that it names.

    `found`: None if there is none, for the reason `why`.
    """

    found: CapacityPlan | None
    least: Bound | None = None
    explored: Explored | None = None  # only where it does not fit
    why: str = ""

    @property
    def refused(self) -> bool:
        """Whether no allocator could fit it into the device."""
        return self.found is not None and self.found.trouble is None and self.found.fits is False

    def lines(self) -> list[str]:
        """At most three lines."""
        from ...verifier.report import capacity

        if self.found is None:
            return [f"plan: none: {self.why}"]
        if self.found.trouble is not None:
            trouble = self.found.trouble
            return [
                f"plan: {'not followed to its end' if trouble.unfollowed else 'error'}:"
                f" {trouble.text}"
            ]
        lines = [f"plan: {capacity.outcome(self.found)}"]
        return [*lines, *([capacity.fastest(self.least)] if self.least is not None else [])]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
        from ...verifier.report import settings_search

        found, least = self.found, self.least
        if found is None or found.highest is None:
            return {
                "fits": None,
                "why": self.why or (found.trouble.text if found and found.trouble else ""),
            }
        return {
            "fits": found.fits,
            "device_memory": found.memory,
            "peak": found.highest.bytes,
            "needed": found.needed,
            "expandable": found.expandable,
            "trouble": found.trouble.text if found.trouble else None,
            "bound": least.step if least is not None else None,
            "explored": settings_search.data(self.explored) if self.explored is not None else None,
        }


def planned(path: Path, changes: Sequence[str], spec: Spec, explore: bool = False) -> Short | None:
    """The plan; None where the spec names no device.

    `explore`: where it does not fit, also what would.
    """
    memory, mesh = device_memory(spec["launch"]), production(spec["parallel"], spec["launch"])
    if memory is None or mesh is None:
        return None
    log(f"planning {path} on {mesh.ranks} ranks (--no-plan leaves it out)")
    work = temporary("plan")
    try:
        return _planned(path, changes, int(memory * GIB), mesh.ranks, work, explore)
    except (UserError, MachineRefuses) as error:
        return Short(None, why=str(error).partition("\n")[0])
    finally:
        with defer_signals():
            remove(work)


def _planned(
    path: Path, changes: Sequence[str], memory: int, ranks: int, work: Path, explore: bool
) -> Short:
    from ...verifier.analysis.capacity import judge
    from ...verifier.launch.capacity import CapacityRuns
    from . import target as targets
    from .settings import TWO, OfSpec
    from .settings_search import Limits, explore_spec, tried

    spec, changes = targets.with_made_up_data(path, changes)
    gpu: Device | None = device_of(spec["launch"])
    per_node = spec["launch"]["devices_per_node"]
    of = OfSpec(path, tuple(changes), spec, ranks, per_node)
    limits = Limits(memory, gpu, per_node, time.monotonic() + SECONDS, TRIES)
    small, passes = of.tried(spec)
    target = targets.of_spec(small, work / "project", ranks, SECONDS)
    with CapacityRuns(work, sys.executable, per_node, 1, limits.until) as capacity_runs:
        (run,) = capacity_runs.run([(targets.planned(target, TWO), work / "made")])
    if run is None:
        return Short(None, why=f"it took longer than {SECONDS:.0f} s: fsdp2 plan {path}")
    found = tried(judge(run, memory), passes)
    least = targets.least_time(found.record, gpu.with_node(per_node) if gpu else None, spec, ranks)
    made = Short(found, least)
    if not explore or not made.refused:
        return made
    log("it does not fit; looking for settings that do")
    limits = Limits(memory, gpu, per_node, time.monotonic() + SECONDS, TRIES)
    return Short(found, least, explore_spec(of, limits, work / "explored", of.savers()))


def problem(path: Path, changes: Sequence[str], plan: Short) -> Problem:
    """What `spec check` says of a spec that does not fit, at the key that names the device."""
    from ...verifier.report import capacity, settings_search
    from ..spec import Problem, load
    from ..spec.loading import place

    assert plan.found is not None, "only of a plan that does not fit"
    launch = load(path, changes, offline=True)["launch"]
    key = next(key for key in KEYS if launch[key.partition(".")[2]])
    message = f"{key} {launch[key.partition('.')[2]]}: {capacity.outcome(plan.found)}"
    if plan.explored is not None:
        message += f"; {settings_search.remedy(plan.explored)}"
    return Problem(place(path, changes, key), message, key)

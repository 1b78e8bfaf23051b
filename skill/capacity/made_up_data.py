"""The plan of a spec whose launch section names the device: the lines of `fsdp2 new`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    from ...verifier.config.devices import Device
    from ..spec import Spec

SECONDS = 120.0  # for the plan
KEYS = ("launch.device_memory", "launch.gpu", "launch.skypilot_accelerator")


@dataclass(frozen=True)
class Short:
    """The plan of a spec on the device that it names.

    `found`: None if there is none, for the reason `why`.
    """

    found: CapacityPlan | None
    least: Bound | None = None
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
        lines += [capacity.fastest(self.least)] if self.least is not None else []
        return [*lines, *([capacity.host_copy(self.found.copy)] if self.found.copy else [])]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON data."""
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
            "host_copy": asdict(found.copy) if found.copy is not None else None,
        }


def planned(path: Path, changes: Sequence[str], spec: Spec) -> Short | None:
    """The plan; None where the spec names no device."""
    memory, mesh = device_memory(spec["launch"]), production(spec["parallel"], spec["launch"])
    if memory is None or mesh is None:
        return None
    log(f"planning {path} on {mesh.ranks} ranks (--no-plan leaves it out)")
    work = temporary("plan")
    try:
        return _planned(path, changes, int(memory * GIB), mesh.ranks, work)
    except (UserError, MachineRefuses) as error:
        return Short(None, why=str(error).partition("\n")[0])
    finally:
        with defer_signals():
            remove(work)


def _planned(path: Path, changes: Sequence[str], memory: int, ranks: int, work: Path) -> Short:
    from ...verifier.analysis.capacity import judge
    from ...verifier.launch.capacity import CapacityRuns
    from . import target as targets
    from .settings import TWO, shortened
    from .settings_search import tried

    spec, changes = targets.with_made_up_data(path, changes)
    gpu: Device | None = device_of(spec["launch"])
    per_node = spec["launch"]["devices_per_node"]
    until = time.monotonic() + SECONDS
    small, passes = shortened(spec, ranks)
    target = targets.of_spec(small, work / "project", ranks, SECONDS)
    with CapacityRuns(work, sys.executable, per_node, 1, until) as capacity_runs:
        (run,) = capacity_runs.run([(targets.planned(target, TWO), work / "made")])
    if run is None:
        return Short(None, why=f"it took longer than {SECONDS:.0f} s: fsdp2 plan {path}")
    found = targets.with_copy(tried(judge(run, memory), passes), spec, ranks, per_node)
    least = targets.least_time(found.record, gpu.with_node(per_node) if gpu else None, spec, ranks)
    return Short(found, least)

"""What is planned: a script, a scaffold, or a spec, whose project is written to a folder of its own
first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...verifier.errors import UserError
from ..output import log
from .settings import TWO, shortened

if TYPE_CHECKING:
    from ...verifier.analysis.capacity import CapacityPlan
    from ...verifier.analysis.roofline import Bound
    from ...verifier.config.devices import Device
    from ...verifier.config.target import Target
    from ...verifier.launch.planned import PlannedRun
    from ...verifier.trace.events import CapacityRecord
    from ..spec import Spec

MADE_UP = "data={kind: synthetic}"
SPECS = (".yaml", ".yml")
SHOWS = "tqdm"  # other packages use it, too: where it is installed, it stays
PER_NODE = 8  # ranks of a node, where nothing says it


def spec_file(path: Path) -> Path | None:
    """The spec of a target: itself, or that of a scaffold's folder; None for a script."""
    from ..scaffold.manifest import MANIFEST

    if path.suffix in SPECS:
        return path
    spec = path / "spec.yaml"
    return spec if (path / MANIFEST).is_file() and spec.is_file() else None


def with_made_up_data(path: Path, changes: Sequence[str]) -> tuple[Spec, list[str]]:
    """The spec, and the changes with which it was read.

    Its data are made up, so that they need not be here; those that no script can make up must be.
    """
    from ..spec import SpecError, load

    spec = load(path, changes, offline=True)
    if spec["data"]["kind"] not in ("synthetic", "import"):
        with contextlib.suppress(SpecError):
            return load(path, [*changes, MADE_UP], offline=True), [*changes, MADE_UP]
    return spec, list(changes)


class DataMissing(UserError):
    """The data of a spec are not here, and none can be made up in their place."""


def missing_data(path: Path, changes: Sequence[str]) -> str:
    """Why the data of a spec cannot be trained on here; "" if they can."""
    from ..spec import SpecError, load

    try:
        load(path, changes)
    except SpecError as error:
        found = (one.message for one in error.problems if one.key.startswith("data."))
        return next(found, "")
    return ""


def ranks_of(spec: Spec | None) -> int:
    """The ranks of a spec."""
    from ..spec.meshes import production

    mesh = production(spec["parallel"], spec["launch"]) if spec is not None else None
    if mesh is None or mesh.ranks < 1:
        raise UserError("--nproc: give the number of ranks, such as --nproc 64")
    return mesh.ranks


def of_spec(
    spec: Spec, out: Path, ranks: int | str, timeout: float | str, args: Sequence[str] = ()
) -> Target:
    """The project of a spec, written to `out`."""
    from ...verifier.config.target import resolve
    from .. import scaffold

    scaffold.write(scaffold.render(spec), out, False)
    return resolve(
        out, {"timeout": timeout, "nproc": ranks, "args": ["--out", "{checkpoint}", *args]}
    )


def of_path(
    path: Path,
    changes: Sequence[str],
    nproc: str | None,
    timeout: str,
    args: Sequence[str],
    work: Path,
    module: str | None = None,
) -> tuple[Target, int]:
    """What the user names, with its arguments of production, and the forward passes of its step if
    fewer of them are run.
    """
    from ...verifier.config.target import resolve

    if path.suffix in SPECS:
        return _made_up(path, changes, nproc, timeout, args, work)
    if changes:
        raise UserError("--set: only for a spec; the arguments of a script go after `--`")
    own = spec_file(path)
    if own is not None and (lacks := missing_data(own, [])):
        if names := _edited(path, own):
            raise DataMissing(
                f"{lacks}; with your edits ({', '.join(names)}) none are made up: fsdp2 plan {own}"
            )
        return _made_up(own, [], nproc, timeout, args, work)
    ranks: int | str | None = nproc
    if ranks is None:
        from ..spec import load

        ranks = ranks_of(load(own, [], offline=True) if own is not None else None)
    given = [*(["--out", "{checkpoint}"] if own is not None else []), *args]
    target = resolve(
        path, {"timeout": timeout, "nproc": ranks, "args": given, "module": module or ""}
    )
    return target, TWO


def _made_up(
    path: Path,
    changes: Sequence[str],
    nproc: str | None,
    timeout: str,
    args: Sequence[str],
    work: Path,
) -> tuple[Target, int]:
    """The project of a spec, with made-up data and at most two forward passes in a step, and how
    many it has. Raises DataMissing.
    """
    spec, made_up = with_made_up_data(path, changes)
    if len(made_up) > len(changes):
        log("the plan of a spec takes made-up data: full samples, one after the other")
    elif lacks := missing_data(path, changes):
        raise DataMissing(f"{lacks}; none can be made up for this model")
    ranks = int(nproc or ranks_of(spec))
    small, passes = shortened(spec, ranks) if not args else (spec, TWO)
    return of_spec(small, work / "project", ranks, timeout, args), passes


def _edited(project: Path, spec: Path) -> list[str]:
    """What a plan runs of a project and is not as its spec has it."""
    from .. import scaffold
    from ..spec import load

    names = scaffold.edited(scaffold.render(load(spec, [], offline=True), project), project)
    return [one for one in names if one == spec.name or ("/" not in one and one.endswith(".py"))]


def planned(target: Target, steps: int) -> PlannedRun:
    """The capacity run of a target."""
    from ...verifier.launch.planned import PlannedRun

    return PlannedRun(
        role="capacity",
        world_size=target.nproc,
        script=target.script,
        cwd=target.cwd,
        module=target.module,
        project=target.project,
        launcher=target.launcher,
        timeout=target.timeout,
        grace=0.0,
        arguments=(*target.args, *target.save_args),
        steps=steps,
        probe={"stand_ins": _stand_ins(target.project)},
    )


def _stand_ins(project: Path) -> list[str]:
    """The packages that a generated project needs to record its run: the plan uploads and writes
    nothing. A script decides itself what it does without them.
    """
    from ..scaffold.context import PACKAGES

    if spec_file(project) is None:
        return []
    return [name for name in PACKAGES.values() if name != SHOWS or find_spec(name) is None]


def with_copy(found: CapacityPlan, spec: Spec | None, ranks: int, per_node: int) -> CapacityPlan:
    """With what a save beside training copies to the host, where the spec has such saves."""
    from ...verifier.analysis.capacity import SHARDED, STATE, HostCopy
    from .lower_bound import bytes_of_state, mesh_on

    if spec is None or spec["checkpoint"]["mode"] == "sync" or not found.whole:
        return found
    peaks = found.record.peaks if found.record is not None else []
    weights, state = (max(peak.kinds.get(key, 0) for peak in peaks) for key in (SHARDED, STATE))
    mesh = mesh_on(spec, ranks)
    if spec["parallel"]["cpu_offload"] and mesh is not None and found.record is not None:
        weights, state = bytes_of_state(spec, mesh, found.record.parameters)
    if spec["finetune"]["kind"] == "lora" and spec["model"].get("pretrained"):
        weights = state // 2  # the adapters alone, whose moments are twice as large
    if spec["optimizer"]["kind"] == "schedule_free":
        weights *= 2  # the mean of the steps, too
    copy = HostCopy(spec["checkpoint"]["mode"], weights + state, min(per_node, ranks))
    return replace(found, copy=copy)


def least_time(
    record: CapacityRecord | None, gpu: Device | None, spec: Spec | None, ranks: int
) -> Bound | None:
    """The bound on the time of a step, if a GPU is named.

    `spec`: that of the project; None for a script.
    """
    from ...verifier.analysis.roofline import bound, offloaded
    from .model_flops import ideal

    if gpu is None or record is None or not record.flops or not record.steps:
        return None
    if spec is None:
        return bound(record, gpu)
    tokens, parallel = spec.tokens_per_step, spec["parallel"]
    needed = ideal(spec, record.parameters, ranks, gpu)
    found = bound(record, gpu, tokens // ranks if tokens else None, needed)
    held = (spec.parameters or 0) * spec.copies(ranks) * parallel["cp"] // ranks
    return offloaded(found, record, gpu, held) if parallel["cpu_offload"] else found

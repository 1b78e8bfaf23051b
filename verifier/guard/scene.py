"""What trains in this process: models that are called, optimizers that step, their tensors."""

import json
import math
import sys
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..probe.compat import tensors
from ..probe.compat.groups import Slot, slots

_PARALLEL = "torch.distributed.tensor.experimental"
_WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
ALIKE = "alike"  # the set of tensors of which only the beginning says whether ranks share them


@dataclass
class Piece:
    """One tensor of the state: `part` is weights, optimizer, buffers or averages; `owner` the
    parameter.
    """

    part: str
    name: str
    tensor: torch.Tensor
    owner: torch.Tensor
    owner_name: str


class Scene:
    """The models and optimizers of one rank. It keeps none of them alive."""

    def __init__(self) -> None:
        self._roots: list[weakref.ref[nn.Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._scalers: list[weakref.ref[Any]] = []
        self._schedules: list[weakref.ref[Any]] = []
        self._averages: list[weakref.ref[nn.Module]] = []
        self.replicated: list[int] = []  # ranks of a DistributedDataParallel

    def adopt(self, root: nn.Module) -> bool:
        """A model was called for training; whether it is new."""
        if any(one() is root for one in self._roots):
            return False
        if any(root is part for _, known in self.roots() for part in known.modules()):
            return False
        inside = {id(one) for one in root.modules()}
        kept = [one for one in self._roots if (known := one()) is None or id(known) not in inside]
        self._roots = [*kept, weakref.ref(root)]
        return True

    def steps(self, optimizer: Optimizer) -> None:
        """An optimizer steps."""
        if not any(one() is optimizer for one in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def roots(self) -> Iterator[tuple[str, nn.Module]]:
        """(prefix of names, model); the first has none."""
        for number, one in enumerate(self._roots):
            if (root := one()) is not None:
                yield f"model{number}." if number else "", root

    def optimizers(self) -> list[Optimizer]:
        """Those that have stepped, in that order."""
        return [found for one in self._optimizers if (found := one()) is not None]

    def slots(self) -> list[Slot]:
        """Every parameter of every model, then those that only an optimizer knows."""
        found = [
            Slot(_name(prefix + one.name), one.param, one.fsdp)
            for prefix, root in self.roots()
            for one in slots(root)
        ]
        known = {id(one.param) for one in found}
        for o, optimizer in enumerate(self.optimizers()):
            for g, group in enumerate(optimizer.param_groups):
                for p, param in enumerate(group["params"]):
                    if id(param) not in known:
                        known.add(id(param))
                        found.append(Slot(f"optimizer{o}.groups[{g}].params[{p}]", param))
        return found

    def weights(self, known: list[Slot]) -> Iterator[Piece]:
        """The parameters."""
        for slot in known:
            yield Piece("weights", slot.name, slot.param, slot.param, slot.name)

    def states(self, known: list[Slot]) -> Iterator[Piece]:
        """The tensors that optimizers keep for parameters."""
        names = {id(slot.param): slot.name for slot in known}
        for optimizer in self.optimizers():
            for param, state in optimizer.state.items():
                name = names.get(id(param)) if isinstance(param, torch.Tensor) else None
                for key, value in state.items() if name and isinstance(state, dict) else ():
                    if isinstance(value, torch.Tensor):
                        yield Piece("optimizer", f"{name}.{key}", value, param, str(name))

    def buffers(self) -> Iterator[Piece]:
        """The buffers of the models, also those that no state dict holds."""
        for prefix, root in self.roots():
            for path, buffer in root.named_buffers():
                name = _name(prefix + path)
                yield Piece("buffers", name, buffer, buffer, name)

    def averages(self) -> Iterator[Piece]:
        """The averaged weights of torch.optim.swa_utils."""
        for number, one in enumerate(self._averages):
            for name, param in model.named_parameters() if (model := one()) is not None else ():
                path = f"average{number}.{_name(name)}"
                yield Piece("averages", path, param, param, path)

    def data_parallel(self) -> list[int]:
        """The ranks that divide the samples with this one, [] where that is not known.

        Under context parallelism ranks of a mesh share samples.
        """
        if any("context_parallel" in name for name in sys.modules if name.startswith(_PARALLEL)):
            return []
        for slot in self.slots():
            if slot.fsdp is not None:
                return [int(one) for one in slot.fsdp.mesh_info.mesh.mesh.flatten().tolist()]
        return list(self.replicated)

    def settings(self) -> dict[str, Any]:
        """Numbers of the groups of optimizers, and the positions of schedules."""
        found: dict[str, Any] = {}
        for o, optimizer in enumerate(self.optimizers()):
            for g, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if isinstance(value, int | float | tuple | list) and key != "params":
                        found[f"optimizer{o}.groups[{g}].{key}"] = value
        for number, one in enumerate(self._schedules):
            found[f"schedule{number}.last_epoch"] = getattr(one(), "last_epoch", None)
        return found

    def scales(self, scaler: Any) -> None:
        """A GradScaler is made."""
        self._scalers.append(weakref.ref(scaler))

    def adopt_average(self, model: nn.Module) -> None:
        """A model of averaged weights is made."""
        self._averages.append(weakref.ref(model))

    def schedules(self, schedule: Any) -> None:
        """A schedule of learning rates is made."""
        self._schedules.append(weakref.ref(schedule))

    def rates(self) -> Iterator[tuple[list[float], list[float], int]]:
        """(rates that it set last, rates of its optimizer, its position) of each schedule."""
        for schedule in filter(None, (one() for one in self._schedules)):
            groups = schedule.optimizer.param_groups
            used = [group["lr"] for group in groups]
            if hasattr(schedule, "_last_lr") and all(isinstance(one, float) for one in used):
                yield [float(one) for one in schedule.get_last_lr()], used, schedule.last_epoch

    def loss_scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The scale of each GradScaler that has one."""
        for number, scaler in enumerate(self._scalers):
            if isinstance(scale := getattr(scaler(), "_scale", None), torch.Tensor):
                yield str(number), scale


def world_size() -> int:
    """The number of ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def placing(piece: Piece, world: int) -> list[tuple[str, int]]:
    """(set, identity): tensors of one set are compared between ranks that have the same identity.

    A set is the mesh of a parameter: its ranks with the same part of it hold the same. ALIKE is
    that of tensors that no mesh places, and of those whose mesh is a part of the ranks: two such
    meshes may hold one model twice, or other experts under the same names.
    """
    owner = piece.owner
    # A number of the state, such as a count of steps, is that of the whole parameter.
    number = piece.part == "optimizer" and piece.tensor.dim() == 0
    if number or not isinstance(owner, DTensor):
        return [(ALIKE, _number(f"{piece.name}{tuple(piece.tensor.shape)}"))]
    where = _number(f"{piece.name}{tensors.box(owner)}")
    mesh = owner.device_mesh
    found = [(_mesh(mesh), where)]
    return found if mesh.size() == world else [*found, (ALIKE, where)]


@lru_cache(maxsize=64)
def _mesh(mesh: DeviceMesh) -> str:
    """A short name of the ranks of a mesh."""
    return f"mesh{_number(json.dumps(mesh.mesh.flatten().tolist())):x}"


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def _name(name: str) -> str:
    """A parameter's name without what wrappers add."""
    for one in _WRAPPED:
        name = name.replace(one, "")
    return name


def contributes(tensor: torch.Tensor, rank: int) -> bool:
    """Whether this rank's part is one of those that add up to the whole tensor."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    at = tensor.device_mesh.get_coordinate()
    return at is not None and not any(
        place and placement.is_replicate()
        for place, placement in zip(at, tensor.placements, strict=True)
    )


def largest(some: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """(name, largest absolute value) of this rank's parts that have elements."""
    parts = [(name, tensors.plain(tensors.local(one))) for name, one in some]
    parts = [
        (name, part)
        for name, part in parts
        if part.numel() and part.layout == torch.strided and part.is_floating_point()
    ]
    if not parts:
        return []
    norms = torch._foreach_norm([part for _, part in parts], math.inf)
    return [(name, norm) for (name, _), norm in zip(parts, norms, strict=True)]

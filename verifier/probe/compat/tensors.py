"""Parameters and tensors: what FSDP manages, the shard of a DTensor and where it lies, what changed in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...trace.events import Mesh
from .names import GET_STATE, LEAVES, SHARD_POSITION, MissingName, need


@dataclass
class Slot:
    """One parameter of a model, by the object that lives from step to step (the shard, if FSDP manages it)."""

    name: str
    param: torch.Tensor
    fsdp: Any = None

    @property
    def unsynced(self) -> bool:
        """Whether FSDP holds a gradient for it that no reduce-scatter has taken."""
        if self.fsdp is None:
            return False
        whole = getattr(self.fsdp, "_unsharded_param", None)
        return self.fsdp.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def groups(root: nn.Module) -> list[tuple[str, Any]]:
    """(module name, FSDP parameter group) of every group with parameters below `root`."""
    found: list[tuple[str, Any]] = []
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule) and (state := _state(module)) is not None:
            found += [(name, group) for group in _groups_of(state) if all(group is not seen for _, seen in found)]
    return found


def _state(module: FSDPModule) -> Any:
    """What FSDP keeps of a module; None of one that DDP stands in for."""
    ask = getattr(module, GET_STATE.rpartition(".")[2], None)
    if ask is None:
        raise MissingName(GET_STATE.replace(":", "."))
    return ask()


def _groups_of(state: Any) -> list[Any]:
    if (many := getattr(state, "_fsdp_param_groups", None)) is not None:
        return list(many)
    single = state._fsdp_param_group  # of versions that know one group
    return [single] if single is not None else []


def slots(root: nn.Module) -> list[Slot]:
    """Every parameter of `root` once, in `named_parameters` order, tied ones under their first name."""
    managed: dict[tuple[int, str], Any] = {}
    for _, group in groups(root):
        for item in group.fsdp_params:
            info = item._module_info
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for module, name in owners:
                managed[(id(module), name)] = item
    out: list[Slot] = []
    seen: set[int] = set()
    for prefix, module in root.named_modules():
        for name, param in module._parameters.items():
            item = managed.get((id(module), name))
            kept = item.sharded_param if item is not None else param
            if kept is None or id(kept) in seen:
                continue
            seen.add(id(kept))
            out.append(Slot(f"{prefix}.{name}" if prefix else name, kept, item))
    return out


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` on this rank, detached."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(global shape, local shape, offset of the local part) of a DTensor or a plain tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return shape, shape, (0,) * len(shape)
    own, offset = need(SHARD_POSITION)(tensor.shape, tensor.device_mesh, tensor.placements)
    return shape, tuple(own), tuple(offset)


@dataclass
class Layout:
    """Placements and mesh of a tensor, and `copy`: which of its replicas this rank holds."""

    sharded: bool
    placements: list[str]
    mesh: list[int]
    mesh_names: list[str]
    ranks: list[int]
    copy: int


def layout(tensor: torch.Tensor, rank: int) -> Layout:
    """How a tensor lies over the ranks.

    Ranks whose meshes are other slices of one larger mesh (the data-parallel meshes beside tensor parallelism) hold other copies.
    """
    if not isinstance(tensor, DTensor):
        return Layout(False, [], [], [], [], rank)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    copy = 0
    for size, at, placement in zip(mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            copy = copy * size + at
    ranks = mesh.mesh.flatten().tolist()
    return Layout(
        sharded=True,
        placements=[str(p) for p in tensor.placements],
        mesh=list(mesh.shape),
        mesh_names=list(mesh.mesh_dim_names or []),
        ranks=ranks,
        copy=copy + min(ranks, default=0) * mesh.size(),
    )


def partial_over(tensor: DTensor) -> int:
    """Over how many ranks a DTensor is still to be reduced (1: its local values are those of the whole)."""
    count = 1
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        count *= size if placement.is_partial() else 1
    return count


def data_mesh(options: dict[str, Any]) -> DeviceMesh | None:
    """The mesh over which `fully_shard(module, **options)` shards and replicates; None if the script gives none."""
    mesh: DeviceMesh | None = options.get("mesh")
    dims = options.get("dp_mesh_dims")
    if mesh is None or dims is None:
        return mesh
    return mesh[(*dims.replicate_names, *dims.shard_names)]


def groups_of(mesh: DeviceMesh | None) -> list[Any]:
    """The process groups over which gradients of what is sharded over `mesh` are reduced, one after the other."""
    if mesh is None or mesh.size() == dist.get_world_size():
        return [None]
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def mesh_groups(root: nn.Module) -> list[Any]:
    """The process groups of the meshes over which the parameters of `root` lie."""
    meshes: list[Any] = []
    for param in root.parameters():
        if isinstance(param, DTensor) and all(param.device_mesh is not mesh for mesh in meshes):
            meshes.append(param.device_mesh)
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def mesh_of(mesh: DeviceMesh | None) -> Mesh | None:
    """A mesh as data."""
    if mesh is None:
        return None
    return Mesh(shape=list(mesh.shape), names=list(mesh.mesh_dim_names or []), ranks=mesh.mesh.flatten().tolist())


def leaves(value: Any) -> list[Any]:
    """What is left when tuples, lists, dicts and registered dataclasses are opened."""
    found: list[Any] = need(LEAVES)(value)
    return found


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors among the leaves."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module holds itself, under their names."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers that a module holds itself, under their names."""
    return module._buffers


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view with a gradient."""
    return tensor.requires_grad and tensor._base is not None


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def autocast_is_on(context: torch.autocast) -> bool:
    """Whether this autocast casts."""
    return bool(context._enabled)


def turn_off(context: torch.autocast) -> None:
    """Let this autocast cast nothing."""
    context._enabled = False

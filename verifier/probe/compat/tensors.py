"""Tensors: the local part of a DTensor and its position, meshes, tensors in nested values, changes
in place.
"""

import inspect
import math
from collections import UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...trace.events import Mesh
from .names import LEAVES, SHARD_POSITION, need

# what the storage of a sparse tensor raises, and that of one of functorch
NO_STORAGE = (NotImplementedError, RuntimeError)


def own_tensors() -> AbstractContextManager[None]:
    """While the probe computes: its tensors, and those that torch's helpers make for it, do not
    follow a default device of the script.
    """
    return torch._C.DisableTorchFunction()


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of `tensor` on this rank, detached."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


def versions(tensor: torch.Tensor) -> tuple[int, int]:
    """How often a tensor was written in place, and its local part: an operation on a DTensor counts
    in one of them.
    """
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return tensor._version, part._version


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A local tensor with memory of its own: of a class that holds other tensors (quantised state)
    the values, or else these in a row.
    """
    if tensor.layout != torch.strided or not hasattr(tensor, "__tensor_flatten__"):
        return tensor
    if (whole := _to_values(type(tensor))) is not None:
        return whole(tensor)
    inner = [plain(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    return torch.cat([one.detach().reshape(-1).to(torch.float64) for one in inner])


@cache
def _to_values(cls: type[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The method of a quantised class that gives its values; `dequantize` of torchao's NF4Tensor is
    a function of something else.
    """
    for name in ("dequantize", "get_original_weight"):
        own = inspect.getattr_static(cls, name, None)
        if inspect.isfunction(own):
            return own
    return None


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The stored elements of a detached tensor: of a sparse or a nested one its values, in the
    order of its indices.
    """
    if tensor.layout == torch.strided:
        return tensor
    return (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values()


def holds_others(tensor: torch.Tensor) -> bool:
    """Whether this rank's part is of a class that holds other tensors, such as quantised values
    with their scales.
    """
    return hasattr(local(tensor), "__tensor_flatten__")


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory holds this rank's part: of a class that holds other tensors, the
    first of these.
    """
    part = elements(local(tensor))
    while hasattr(part, "__tensor_flatten__"):
        part = getattr(part, part.__tensor_flatten__()[0][0])
    return part


def box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(global shape, local shape, offset of the local part) of a DTensor or a plain tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return shape, shape, (0,) * len(shape)
    own, offset = _position(tensor.shape, tensor.device_mesh, tensor.placements)
    return shape, own, offset


@lru_cache(maxsize=4096)
def _position(
    shape: torch.Size, mesh: DeviceMesh, placements: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    own, offset = need(SHARD_POSITION)(shape, mesh, placements)
    return tuple(own), tuple(offset)


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
    """The distribution of a tensor over the ranks.

    Ranks whose meshes are other slices of a larger mesh (data-parallel meshes beside tensor
    parallelism) hold other copies.
    """
    if not isinstance(tensor, DTensor):
        return Layout(False, [], [], [], [], rank)
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    copy = 0
    for size, at, placement in zip(mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            copy = copy * size + at
    # a part of a mesh in a file, read by a process of no group, cannot say its ranks
    ranks = mesh.mesh.flatten().tolist() if dist.is_initialized() else []
    return Layout(
        sharded=True,
        placements=[str(p) for p in tensor.placements],
        mesh=list(mesh.shape),
        mesh_names=list(mesh.mesh_dim_names or []),
        ranks=ranks,
        copy=copy + min(ranks, default=0) * mesh.size(),
    )


def partial_over(tensor: DTensor) -> int:
    """Over how many ranks a DTensor is Partial (1: its local values are those of the whole)."""
    dims = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in dims if placement.is_partial())


def data_mesh(options: dict[str, Any]) -> DeviceMesh | None:
    """The mesh over which `fully_shard(module, **options)` shards and replicates; None if the
    script gives none.
    """
    mesh: DeviceMesh | None = options.get("mesh")
    dims = options.get("dp_mesh_dims")
    return (
        mesh if mesh is None or dims is None else mesh[(*dims.replicate_names, *dims.shard_names)]
    )


def ranks_of(mesh: DeviceMesh | None) -> int:
    """How many ranks share the gradients of what is sharded over a mesh; without one, all."""
    if mesh is not None:
        return int(mesh.size())
    return dist.get_world_size() if dist.is_initialized() else 1


def groups_of(mesh: DeviceMesh | None) -> list[Any]:
    """The process groups over which the gradients of what is sharded over `mesh` are reduced, in
    order.
    """
    if mesh is None or mesh.size() == dist.get_world_size():
        return [None]
    return [mesh.get_group(dim) for dim in range(mesh.ndim)]


def mesh_groups(root: nn.Module) -> list[Any]:
    """The process groups of the meshes of the parameters of `root`."""
    meshes = {id(p.device_mesh): p.device_mesh for p in root.parameters() if isinstance(p, DTensor)}
    return [group for mesh in meshes.values() for group in mesh.get_all_groups()]


def mesh_of(mesh: DeviceMesh | None) -> Mesh | None:
    """A mesh as data."""
    return (
        None
        if mesh is None
        else Mesh(
            shape=list(mesh.shape),
            names=list(mesh.mesh_dim_names or []),
            ranks=mesh.mesh.flatten().tolist(),
        )
    )


def tensors(value: Any, levels: int = 4) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts, mappings of another class and, so many levels
    deep, dataclasses.
    """
    found: list[torch.Tensor] = []
    for leaf in need(LEAVES)(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, UserDict):
            found += tensors(leaf.data, levels)
        elif (
            levels and is_dataclass(leaf) and not isinstance(leaf, type | nn.Module)
        ):  # one that pytree does not know
            found += tensors(
                [getattr(leaf, field.name, None) for field in fields(leaf)], levels - 1
            )
    return found


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters that a module holds itself, under their names."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers that a module holds itself, under their names."""
    return module._buffers


def address(tensor: torch.Tensor) -> int:
    """Where the memory of this rank's part begins, which views of it share; 0 if it has none."""
    part = in_memory(tensor)
    try:
        return part.untyped_storage().data_ptr() if part.device.type != "meta" else 0
    except NO_STORAGE:
        return 0


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

"""Every private torch name that the probe needs, and the versions on which it was run.

| name | where | run on |
|---|---|---|
| `FSDPModule._get_fsdp_state()._fsdp_param_groups[].fsdp_params[]` | managed parameters | 2.13.0 |
| `FSDPParam.sharded_param`, `._module_info` | their shards and owners | 2.13.0 |
| `FSDPParam._unsharded_param`, `.unsharded_accumulated_grad` | unsynced gradients | 2.13.0 |
| `FSDPState._fsdp_param_group` (one group) | as above | the fallback for versions without the list |
| `DTensor._local_tensor` | the shard, without a graph node | 2.13.0 |
| all of these | in two scripts (`tests/zoo/minimal.py`, `tests/libraries/torch/train.py`) | 2.7.1 |
| `FSDPModule.set_reduce_scatter_divide_factor` | what `set_gradient_divide_factor` is called there | 2.7.1 |
| `utils._pytree.tree_leaves` | the tensors among a forward's arguments | 2.13.0 |
| `utils.data.dataloader._BaseDataLoaderIter` | the batches that a loader has given | 2.13.0 |
| `distributed.tensor._utils.compute_local_shape_and_global_offset` | where a shard lies | 2.13.0 |
| `distributed.checkpoint.state_dict_saver._stateful_to_state_dict` | what a DCP save is about to take | 2.13.0 |
| `distributed.checkpoint._async_process_executor._AsyncCheckpointProcess.save` | a rank gives a save to its writing process | 2.13.0 |
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.checkpoint import _async_process_executor, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator

__all__ = [
    "DIVIDE",
    "LoaderIterator",
    "Slot",
    "box",
    "groups",
    "layout",
    "leaves",
    "local",
    "replace_everywhere",
    "slots",
]

DIVIDE = "set_gradient_divide_factor"  # its name since some version after 2.7.1
if not hasattr(FSDPModule, DIVIDE):
    DIVIDE = "set_reduce_scatter_divide_factor"


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
        if isinstance(module, FSDPModule) and (state := getattr(module, "_get_fsdp_state", lambda: None)()) is not None:
            many = getattr(state, "_fsdp_param_groups", None)
            if many is None:
                single = getattr(state, "_fsdp_param_group", None)
                many = [single] if single is not None else []
            found += [(name, group) for group in many if all(group is not seen for _, seen in found)]
    return found


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
    own, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return shape, tuple(own), tuple(offset)


def layout(tensor: torch.Tensor, rank: int) -> dict[str, Any]:
    """Placements and mesh of a tensor, and `copy`: which of its replicas this rank holds.

    Ranks whose meshes are other slices of one larger mesh (the data-parallel meshes beside tensor parallelism) hold other copies.
    """
    if not isinstance(tensor, DTensor):
        return {"sharded": False, "placements": [], "mesh": [], "mesh_names": [], "ranks": [], "copy": rank}
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate() or [0] * mesh.ndim
    copy = 0
    for size, at, placement in zip(mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            copy = copy * size + at
    ranks = mesh.mesh.flatten().tolist()
    return {
        "sharded": True,
        "placements": [str(p) for p in tensor.placements],
        "mesh": list(mesh.shape),
        "mesh_names": list(mesh.mesh_dim_names or []),
        "ranks": ranks,
        "copy": copy + min(ranks, default=0) * mesh.size(),
    }


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


def mesh_groups(root: nn.Module) -> list[Any]:
    """The process groups of the meshes over which the parameters of `root` lie."""
    meshes: list[Any] = []
    for param in root.parameters():
        if isinstance(param, DTensor) and all(param.device_mesh is not mesh for mesh in meshes):
            meshes.append(param.device_mesh)
    return [group for mesh in meshes for group in mesh.get_all_groups()]


def listen_to_saved_dicts(heard: Callable[[dict[str, Any]], None]) -> None:
    """Call `heard` with every dict that `dcp.save` or `dcp.async_save` takes, its Stateful values already asked for theirs."""
    real = getattr(state_dict_saver, "_stateful_to_state_dict", None)
    if real is None:
        return

    @functools.wraps(real)
    def expanded(state_dict: dict[str, Any]) -> dict[str, Any]:
        result: dict[str, Any] = real(state_dict)
        heard(result)
        return result

    state_dict_saver._stateful_to_state_dict = expanded


def listen_to_writing_processes(heard: Callable[[object], None]) -> None:
    """Call `heard` with the checkpoint id of every save that is about to go to a process of DCP's own."""
    process = _async_process_executor._AsyncCheckpointProcess
    real = process.save

    @functools.wraps(real)
    def given(self: Any, *args: Any, **kwargs: Any) -> Any:
        heard(kwargs.get("checkpoint_id"))
        return real(self, *args, **kwargs)

    process.save = given  # type: ignore[method-assign]


def replace_everywhere(real: object, ours: object) -> None:
    """Put `ours` in the place of a function in every module of torch that holds it, under whatever name.

    Public functions have more paths than one: torch 2.13.0 holds `fully_shard` in `torch.distributed.fsdp`, in `._fully_shard` and
    `._fully_shard._fully_shard` below it, and in `torch.distributed._composable.fsdp` and `.fully_shard` below that.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch":
            for key, value in list(getattr(module, "__dict__", {}).items()):
                if value is real:
                    setattr(module, key, ours)


def leaves(value: Any) -> list[Any]:
    """What is left when tuples, lists, dicts and registered dataclasses are opened."""
    return pytree.tree_leaves(value)

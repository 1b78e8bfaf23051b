"""What the probe asks of FSDP's groups, and where it listens to them. Private names of torch, as in `torchlib`.

| name | where | run on |
|---|---|---|
| `FSDPParamGroup.post_backward`, `._to_sharded` | a reduction begins; a group is sharded again | 2.13.0 |
| `FSDPParamGroup.reduce_grads`, `.reduce_scatter_unused_params`, `._module_fqn`, `.mesh_info` | what is reduced | 2.13.0 |
| `FSDPParamGroup._partial_reduce_output`, `.is_unsharded` | what a step finds | 2.13.0 |
| `FSDPParamGroup._reshard_after_forward`, `.all_reduce_grads`, `.mesh_info` (its classes) | what a backward costs | 2.13.0 |
| `FSDPState._register_pre_backward_hook`, `._modules` | a wrapped module returns | 2.13.0 |
| `FSDPParam._param_fqn`, `.unsharded_accumulated_grad`, `._unsharded_param` | parameters with a gradient | 2.13.0 |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from . import torchlib
from .measures import class_name


def mesh_of(mesh: DeviceMesh | None) -> dict[str, Any] | None:
    """A mesh as data."""
    if mesh is None:
        return None
    names = list(mesh.mesh_dim_names or [])
    return {"shape": list(mesh.shape), "names": names, "ranks": mesh.mesh.flatten().tolist()}


def managed(root: nn.Module) -> dict[tuple[int, str], Any]:
    """{(id of a module, name of its parameter): the FSDPParam that manages it}."""
    found: dict[tuple[int, str], Any] = {}
    for _, group in torchlib.groups(root):
        for item in group.fsdp_params:
            info = item._module_info
            found[(id(info.module), info.param_name)] = item
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                found[(id(module), name)] = item
    return found


def without_gradient(group: Any) -> list[str]:
    """The trainable parameters of a group that bring no gradient to a reduction that is about to begin."""
    missing = []
    for item in group.fsdp_params:
        whole = getattr(item, "_unsharded_param", None)
        has = getattr(item, "unsharded_accumulated_grad", None) is not None
        has = has or (whole is not None and whole.grad is not None)
        if item.sharded_param.requires_grad and not has:
            missing.append(str(getattr(item, "_param_fqn", None) or item._module_info.param_name))
    return missing


def collectives(group: Any, backward: bool) -> dict[str, int]:
    """The collectives that one forward, and a backward if there is one, should cost a group, as it is set now."""
    mesh = group.mesh_info
    shards = isinstance(mesh, FSDPMeshInfo) and mesh.shard_mesh_size > 1
    trained = group.reduce_grads and any(item.sharded_param.requires_grad for item in group.fsdp_params)
    replicas = isinstance(mesh, DDPMeshInfo) and mesh.replicate_mesh_size > 1
    return {
        "all_gather": (2 if backward and group._reshard_after_forward else 1) if shards else 0,
        "reduce_scatter": int(shards and trained),
        "all_reduce": int(replicas and trained and group.all_reduce_grads),
    }


def name_of(group: Any) -> str:
    """The name of the module whose parameters a group holds."""
    return str(getattr(group, "_module_fqn", None) or "")


def modules_of(state: Any) -> str:
    """The classes of the modules of an FSDP state."""
    return ", ".join(class_name(m).rpartition(".")[2].removeprefix("FSDP") for m in state._modules)


def reduction() -> Callable[..., Any]:
    """What runs when the gradients of a group are complete."""
    return FSDPParamGroup.post_backward


def sharding() -> Callable[..., Any]:
    """What runs when a group goes back to its shards."""
    return FSDPParamGroup._to_sharded


def returning() -> Callable[..., Any]:
    """What runs when a wrapped module returns."""
    return FSDPState._register_pre_backward_hook


def listen(reduced: Callable[..., Any], resharded: Callable[..., Any], returned: Callable[..., Any]) -> None:
    """Put these in the place of `reduction`, `sharding` and `returning`."""
    FSDPParamGroup.post_backward = reduced  # type: ignore[method-assign]
    FSDPParamGroup._to_sharded = resharded  # type: ignore[method-assign]
    FSDPState._register_pre_backward_hook = returned  # type: ignore[method-assign]

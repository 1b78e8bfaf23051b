"""FSDP's parameter groups: what they manage, reduce and cost."""

from __future__ import annotations

from typing import Any

from torch import nn

from .names import REPLICATED_MESH, SHARDED_MESH, need
from .tensors import groups


def managed(root: nn.Module) -> dict[tuple[int, str], Any]:
    """{(id of a module, name of its parameter): the FSDPParam that manages it}."""
    found: dict[tuple[int, str], Any] = {}
    for _, group in groups(root):
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
    shards = isinstance(mesh, need(SHARDED_MESH)) and mesh.shard_mesh_size > 1
    trained = group.reduce_grads and any(item.sharded_param.requires_grad for item in group.fsdp_params)
    replicas = isinstance(mesh, need(REPLICATED_MESH)) and mesh.replicate_mesh_size > 1
    return {
        "all_gather": (2 if backward and group._reshard_after_forward else 1) if shards else 0,
        "reduce_scatter": int(shards and trained),
        "all_reduce": int(replicas and trained and group.all_reduce_grads),
    }


def name_of(group: Any) -> str:
    """The name of the module whose parameters a group holds."""
    return str(getattr(group, "_module_fqn", None) or "")


def modules_of(state: Any) -> tuple[nn.Module, ...]:
    """The modules of an FSDP state."""
    found: tuple[nn.Module, ...] = state._modules
    return found


def fills_unused(group: Any) -> bool:
    """Whether FSDP puts zeros in the place of gradients that are missing."""
    return bool(getattr(group, "reduce_scatter_unused_params", False))


def ranks_of(group: Any) -> list[int]:
    """The ranks over which a group reduces."""
    found: list[int] = group.mesh_info.mesh.mesh.flatten().tolist()
    return found


def trainable(group: Any) -> int:
    """How many parameters of a group are trained."""
    return sum(bool(item.sharded_param.requires_grad) for item in group.fsdp_params)


def not_all_reduced(group: Any) -> bool:
    """Whether a group holds a gradient that was reduced over a part of its ranks only."""
    return getattr(group, "_partial_reduce_output", None) is not None

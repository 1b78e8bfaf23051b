"""FSDP's parameters and their groups: which module owns them, what they reduce, which collectives
they need.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from .names import GET_STATE, REPLICATED_MESH, SHARDED_MESH, MissingName, need
from .tensors import local

_OWN_DECIDES = hasattr(MixedPrecisionPolicy, "param_dtype_override_fn")  # both came with torch 2.15


@dataclass
class Slot:
    """One parameter of a model, by the object that lives from step to step (the shard, if FSDP
    manages it).
    """

    name: str
    param: torch.Tensor
    fsdp: Any = None

    @property
    def unsynced(self) -> bool:
        """Whether FSDP holds a gradient for it that was not reduce-scattered."""
        return self.fsdp is not None and _has_unsharded_gradient(self.fsdp)


def patience() -> float:
    """Seconds after which a collective of the default group raises; infinite if it is not known."""
    group: Any = dist.group.WORLD
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return min(float(one.options._timeout.total_seconds()) for one in backends)
    except (AttributeError, RuntimeError, ValueError):
        return math.inf


def groups(root: nn.Module) -> list[tuple[str, Any]]:
    """(module name, FSDP parameter group) of every group with parameters below `root`."""
    return _groups(root.named_modules())


def dtypes_of(group: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """In which a group computes and reduces; None: as its gradients come.

    Of parameters that differ, those that compute in 16 bits.
    """
    policies = (
        [group.mp_policy]
        if hasattr(group, "mp_policy")
        else [item.mp_policy for item in group.fsdp_params]
    )
    policy = next(
        (one for one in policies if one.param_dtype in (torch.bfloat16, torch.float16)), policies[0]
    )
    return policy.param_dtype, reduces_in(
        policy, (item.sharded_param for item in group.fsdp_params)
    )


def reduces_in(
    policy: MixedPrecisionPolicy | None, params: Iterable[torch.Tensor]
) -> torch.dtype | None:
    """The dtype in which gradients of these parameters are reduced.

    From torch 2.15 on their own decides where the policy names none.
    """
    own = next((param for param in params), None) if _OWN_DECIDES else None
    named = policy.reduce_dtype if policy is not None else None
    return named or (own.grad_dtype if own is not None else None)


def _groups(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, module in modules:
        if isinstance(module, FSDPModule) and (state := _state(module)) is not None:
            many = getattr(state, "_fsdp_param_groups", None)
            # of versions that know one group
            own = [state._fsdp_param_group] if many is None else many
            found += [
                (name, g) for g in own if g is not None and all(g is not seen for _, seen in found)
            ]
    return found


def _state(module: FSDPModule) -> Any:
    """The FSDP state of a module; None of one that a DDP run wraps."""
    if (ask := getattr(module, GET_STATE.rpartition(".")[2], None)) is None:
        raise MissingName(GET_STATE.replace(":", "."))
    return ask()


def slots(root: nn.Module) -> list[Slot]:
    """Every parameter of `root` once, in `named_parameters` order, tied ones under their first
    name.
    """
    modules = list(root.named_modules())
    held = _managed(modules)
    out: dict[int, Slot] = {}
    for prefix, module in modules:
        for name, param in module._parameters.items():
            item = held.get((id(module), name))
            kept = item.sharded_param if item is not None else param
            if kept is not None:
                out.setdefault(id(kept), Slot(f"{prefix}.{name}" if prefix else name, kept, item))
    return list(out.values())


def _has_unsharded_gradient(item: Any) -> bool:
    whole = getattr(item, "_unsharded_param", None)
    accumulated = getattr(item, "unsharded_accumulated_grad", None)
    return accumulated is not None or (whole is not None and whole.grad is not None)


def managed(root: nn.Module) -> dict[tuple[int, str], Any]:
    """{(id of a module, name of its parameter): the FSDPParam that manages it}."""
    return _managed(root.named_modules())


def _managed(modules: Iterable[tuple[str, nn.Module]]) -> dict[tuple[int, str], Any]:
    found: dict[tuple[int, str], Any] = {}
    for _, group in _groups(modules):
        for item in group.fsdp_params:
            info = item._module_info
            owners = [
                (info.module, info.param_name),
                *zip(info.shared_modules, info.shared_param_names, strict=True),
            ]
            for module, name in owners:
                found[id(module), name] = item
    return found


def without_gradient(group: Any) -> list[str]:
    """The trainable parameters of a group that have no gradient in a reduction that is about to
    begin.
    """
    missing = (
        i
        for i in group.fsdp_params
        if i.sharded_param.requires_grad and not _has_unsharded_gradient(i)
    )
    return [
        str(getattr(item, "_param_fqn", None) or item._module_info.param_name) for item in missing
    ]


def collectives(group: Any, backward: bool) -> dict[str, int]:
    """The collectives that one forward, and a backward if there is one, need for a group with its
    current settings.
    """
    mesh = group.mesh_info
    shards = isinstance(mesh, need(SHARDED_MESH)) and mesh.shard_mesh_size > 1
    trained = group.reduce_grads and any(
        item.sharded_param.requires_grad for item in group.fsdp_params
    )
    replicas = isinstance(mesh, need(REPLICATED_MESH)) and mesh.replicate_mesh_size > 1
    return {
        "all_gather": (2 if backward and group._reshard_after_forward else 1) if shards else 0,
        "reduce_scatter": int(shards and trained),
        "all_reduce": int(replicas and trained and group.all_reduce_grads),
    }


def reduction(group: Any) -> dict[str, Any]:
    """The fields of a `Reduce` event: the module of a group, whether FSDP fills missing gradients,
    and the ranks.
    """
    return {
        "group": str(getattr(group, "_module_fqn", None) or ""),
        "filled": bool(getattr(group, "reduce_scatter_unused_params", False)),
        "ranks": group.mesh_info.mesh.mesh.flatten().tolist(),
    }


def out_of_date(group: Any) -> bool:
    """Whether an unsharded group computes with other weights than its shards hold."""
    return bool(group.is_unsharded) and any(_differs(item) for item in group.fsdp_params)


def _differs(item: Any) -> bool:
    """Whether this rank's part of a gathered parameter differs from its shard, in the dtype of the
    gathered one.
    """
    shard, whole, mesh = (
        local(item.sharded_param),
        getattr(item, "_unsharded_param", None),
        item.mesh_info,
    )
    if (
        whole is None
        or whole.untyped_storage().size() == 0
        or hasattr(shard, "fsdp_pre_all_gather")
    ):
        return False
    part = local(whole.detach())
    if isinstance(mesh, need(SHARDED_MESH)):
        parts = part.chunk(mesh.shard_mesh_size, dim=item.fsdp_placement.dim)
        if mesh.shard_mesh_rank >= len(parts):
            return False
        part = parts[mesh.shard_mesh_rank]
    if part.shape != shard.shape:
        return False
    now = shard.to(part.device, part.dtype)
    return not bool(((now == part) | (now.isnan() & part.isnan())).all())


def modules_of(state: Any) -> tuple[nn.Module, ...]:
    """The modules of an FSDP state."""
    found: tuple[nn.Module, ...] = state._modules
    return found


def module_name(group: Any) -> str:
    """The name of the module of a group; "" where it has none yet."""
    return str(getattr(group, "_module_fqn", None) or "")


def whole_gradients(group: Any) -> list[Any]:
    """The gradients of whole parameters that a group holds, which its reduction takes."""
    found = []
    for item in group.fsdp_params:
        whole = getattr(item, "_unsharded_param", None)
        found += [item.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [grad for grad in found if grad is not None]


def not_all_reduced(group: Any) -> bool:
    """Whether a group holds a gradient that was reduced over only a part of its ranks."""
    return getattr(group, "_partial_reduce_output", None) is not None

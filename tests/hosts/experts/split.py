"""Laying a model over the ranks."""

from __future__ import annotations

import torch
from conf import Shard
from nets import Mind
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)


def lay(model: Mind, mesh: DeviceMesh, how: Shard) -> Mind:
    """Blocks on their own; embedding and head share a weight, so both stay with the root."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, how.param), reduce_dtype=getattr(torch, how.reduce), cast_forward_inputs=False
    )
    final = len(model.blocks) - 1
    for number, block in enumerate(model.blocks):
        again = not (how.keep_last and number == final)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for entrance in ("objective", "guess"):
        register_fsdp_forward_method(model, entrance)
    look_ahead(list(model.blocks), how.prefetch)
    return model


def look_ahead(blocks: list[FSDPModule], distance: int) -> None:
    """While one block computes, gather the next ones: forwards in order, backwards in reverse."""
    if distance < 1:
        return
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + distance])
        behind = blocks[max(0, number - distance) : number]
        block.set_modules_to_backward_prefetch(behind[::-1])


def rest(model: Mind) -> None:
    """Give back what a forward without gradient left gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

"""Order: adapters are in, then activation checkpointing, then FSDP."""

from __future__ import annotations

import torch
from recipe import Memory
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def policies(memory: Memory) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """For the layers, and for the root, whose logits the loss takes in float32."""
    compute = getattr(torch, memory.param_dtype)
    reduce = getattr(torch, memory.reduce_dtype)
    inner = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    return inner, MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, output_dtype=torch.float32)


def shard(model: nn.Module, mesh: DeviceMesh, memory: Memory) -> FSDPModule:
    """Wrap and shard every layer, then the rest of the model."""
    inner, outer = policies(memory)
    for index, layer in enumerate(model.layers):
        if memory.checkpoint_blocks:
            layer = checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)
            model.layers[index] = layer
        fully_shard(layer, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Names without wrappers, and what they name."""
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def optimizer_for(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """AdamW; adapters decay, extras do not."""
    named = trainable(model)
    lora = [parameter for name, parameter in named.items() if ".lora_" in name]
    extra = [parameter for name, parameter in named.items() if ".lora_" not in name]
    groups = [{"params": lora, "weight_decay": weight_decay}, {"params": extra, "weight_decay": 0.0, "lr": lr / 4}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))

"""Sharding with FSDP2, and what it leaves on each rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from . import comm


def shard(model: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """Each layer is a group of its own, the root has the rest; all of them free what they gathered after their forward."""
    mesh = init_device_mesh("cpu", (comm.world(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor; to be called on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def describe(model: nn.Module) -> str:
    """Parameters of the model, and how many of them are here."""
    unique = {id(p): p for p in model.parameters()}.values()
    everything, here = sum(p.numel() for p in unique), sum(local(p).numel() for p in unique)
    part = f"{here / 1e3:.1f}k on this rank ({here / everything:.0%})"
    return f"{everything / 1e3:.1f}k parameters, {part}"

"""The network over a mesh (data, tensor): matrices of a block are cut over `tensor`, all parameters are sharded over `data`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .network import Denoiser


class Whole(ParallelStyle):
    """A module that every rank of the tensor dimension computes alike.

    Its parameters become replicated DTensors, so that all parameters of the network lie on one mesh (clipping needs that).
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._take, self._give)

    @staticmethod
    def _take(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return tuple(DTensor.from_local(part, mesh, (Replicate(),), run_check=False) for part in inputs)

    @staticmethod
    def _give(module: nn.Module, output: Any, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()


def mesh_of(world: int, tensor: int, device_type: str) -> DeviceMesh:
    """`tensor` neighbours share a copy of the matrices; fewer where the world is smaller."""
    tensor = min(tensor, world)
    return init_device_mesh(device_type, (world // tensor, tensor), mesh_dim_names=("data", "tensor"))


def spread(network: Denoiser, mesh: DeviceMesh) -> Denoiser:
    """Tensor parallelism first, then FSDP over the data dimension only."""
    across = mesh["tensor"]
    for block in network.blocks:
        plan: dict[str, ParallelStyle] = {
            "norm1": Whole(),
            "norm2": Whole(),
            "modulation": Whole(),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.out": RowwiseParallel(),
            "feed.gate": ColwiseParallel(),
            "feed.up": ColwiseParallel(),
            "feed.down": RowwiseParallel(),
        }
        parallelize_module(block, across, plan)
    parallelize_module(network, across, {name: Whole() for name in ("into", "place", "level", "norm", "back")})
    for block in network.blocks:
        fully_shard(block, mesh=mesh["data"])
    return fully_shard(network, mesh=mesh["data"])


def settle(network: nn.Module) -> None:
    """Give back weights that a forward without gradient left gathered."""
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def mean_over_data(value: torch.Tensor, mesh: DeviceMesh) -> float:
    """The mean over the parts of the data; ranks of one part have equal values."""
    value = value.detach().clone()
    dist.all_reduce(value, group=mesh.get_group("data"))
    return float(value) / mesh.size(0)

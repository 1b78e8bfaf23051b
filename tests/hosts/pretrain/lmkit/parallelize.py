"""The mesh, and how the model lies on it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .config import Parallel
from .models import Transformer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "": None}


def build_mesh(config: Parallel, device_type: str) -> DeviceMesh:
    """Replicas on the outside, shards on the inside; -1 is what the other dimension leaves of the world."""
    world = dist.get_world_size()
    shard = min(config.dp_shard, world) if config.dp_shard > 0 else world // max(config.dp_replicate, 1)
    replicate = world // shard if config.dp_replicate < 0 else config.dp_replicate
    if replicate * shard != world:
        raise SystemExit(f"{replicate} x {shard} ranks do not make a world of {world}")
    return init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("dp_replicate", "dp_shard"))


def data_coordinates(mesh: DeviceMesh) -> tuple[int, int]:
    """Which part of each global batch this rank reads, and of how many: every rank of this mesh reads its own."""
    replicate, shard = mesh.get_coordinate()
    return replicate * mesh.size(1) + shard, mesh.size()


def precision(config: Parallel) -> MixedPrecisionPolicy:
    """float32 weights; compute and reduction as configured."""
    return MixedPrecisionPolicy(param_dtype=DTYPES[config.param_dtype], reduce_dtype=DTYPES[config.reduce_dtype])


def parallelize(model: Transformer, mesh: DeviceMesh, config: Parallel) -> Transformer:
    """Shard each block, then what is left."""
    settings = {"mesh": mesh, "mp_policy": precision(config), "reshard_after_forward": config.reshard_after_forward}
    for block in model.layers.values():
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return model

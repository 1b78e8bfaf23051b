"""Mesh, sharding and materialisation of a model built on the meta device."""
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build_mesh():
    world = dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def shard_model(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@torch.no_grad()
def materialize(model, seed):
    model.to_empty(device="cpu")
    gen = torch.Generator().manual_seed(seed + dist.get_rank())
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.zero_()
        elif "norm" in name:
            param.fill_(1.0)
        else:
            std = 0.02 if name.startswith(("tok", "pos")) else param.shape[-1] ** -0.5
            param.to_local().normal_(0.0, std, generator=gen)

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build_mesh():
    """2-D mesh: two replica groups as soon as there are two ranks, the rest of the world shards."""
    world = dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def apply_hsdp(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model

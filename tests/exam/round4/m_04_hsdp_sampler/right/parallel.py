import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def hybrid_mesh(replicas=2):
    """(replicate, shard): parameters are sharded inside a group and copied between the groups."""
    world = dist.get_world_size()
    replicas = min(replicas, world)
    assert world % replicas == 0
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def wrap(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

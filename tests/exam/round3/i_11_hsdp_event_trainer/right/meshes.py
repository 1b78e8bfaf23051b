import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


class Layout:
    """Two-dim mesh (replicate, shard) and, from it, this rank's place in the data."""

    def __init__(self):
        world = dist.get_world_size()
        replicas = 2 if world >= 4 else 1
        self.mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        shard = self.mesh["shard"]
        self.data_rank = self.mesh["replicate"].get_local_rank() * shard.size() + shard.get_local_rank()
        self.data_world = self.mesh.size()

    def rows(self, t):
        return t.tensor_split(self.data_world)[self.data_rank]

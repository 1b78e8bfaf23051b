from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass
class Topology:
    """Islands shard a model copy inside themselves; equal shards of all islands form a lane."""
    mesh: DeviceMesh
    islands: int
    island_size: int

    @classmethod
    def detect(cls, islands=2):
        world = dist.get_world_size()
        islands = islands if world % islands == 0 else 1
        mesh = init_device_mesh("cpu", (islands, world // islands), mesh_dim_names=("lane", "island"))
        return cls(mesh, islands, world // islands)

    @property
    def island_mesh(self):
        return self.mesh["island"]

    @property
    def lane_group(self):
        return self.mesh.get_group("lane")

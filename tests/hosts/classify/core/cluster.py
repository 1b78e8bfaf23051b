"""The process group behind one small object."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Cluster:
    """Rank, size, device and mesh of this process."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device)
        else:
            self.device = torch.device("cpu")
            dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh(self.device.type, (self.size,), mesh_dim_names=("data",))

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def total(self, *values: Tensor | float) -> list[float]:
        """Sums over all ranks."""
        packed = torch.tensor([float(value) for value in values], device=self.device, dtype=torch.float64)
        dist.all_reduce(packed)
        return packed.tolist()

    def close(self) -> None:
        """Leave together."""
        dist.barrier()
        dist.destroy_process_group()

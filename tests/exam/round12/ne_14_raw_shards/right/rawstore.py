"""Checkpoint as one flat binary file per tensor. Every rank writes its rows at their offset; any number of ranks can read."""
import json
import os

import numpy as np
import torch
import torch.distributed as dist


def rows_of(dtensor):
    """First row and row count of the local part (rows are cut like torch.chunk)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    per = -(-dtensor.shape[0] // world)
    first = min(rank * per, dtensor.shape[0])
    return first, dtensor.to_local().shape[0]


class RawStore:
    def __init__(self, root):
        self.root = root

    def _place(self, step):
        return os.path.join(self.root, f"gen{step:05d}")

    def write(self, step, tensors, scalars):
        place = self._place(step)
        if dist.get_rank() == 0:
            os.makedirs(place, exist_ok=True)
            for name, t in tensors.items():
                np.zeros(tuple(t.shape), np.float32).tofile(os.path.join(place, name + ".f32"))
        dist.barrier()
        for name, t in tensors.items():
            first, count = rows_of(t)
            if count:
                disk = np.memmap(os.path.join(place, name + ".f32"), np.float32, "r+", shape=tuple(t.shape))
                disk[first:first + count] = t.detach().to_local().numpy()
                disk.flush()
        dist.barrier()
        if dist.get_rank() == 0:
            manifest = {"scalars": scalars, "shapes": {n: list(t.shape) for n, t in tensors.items()}}
            with open(os.path.join(place, "manifest.json"), "w") as f:
                json.dump(manifest, f)
        dist.barrier()

    def read_latest(self, tensors):
        done = [d for d in os.listdir(self.root) if os.path.exists(os.path.join(self.root, d, "manifest.json"))]
        place = os.path.join(self.root, max(done))
        with open(os.path.join(place, "manifest.json")) as f:
            manifest = json.load(f)
        for name, t in tensors.items():
            assert manifest["shapes"][name] == list(t.shape), name
            first, count = rows_of(t)
            if count:
                disk = np.memmap(os.path.join(place, name + ".f32"), np.float32, "r", shape=tuple(t.shape))
                t.detach().to_local().copy_(torch.from_numpy(np.array(disk[first:first + count])))
        return manifest["scalars"]

"""DDP in a class, by dotted names: hooks, a sharded optimizer, joins, manual norms, compilation, a copy for averages."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
SAVE_EVERY = 0


def wrap(model):
    return nn.parallel.DistributedDataParallel(  # -> no torch.cuda.set_device; no seed before the model; DistributedDataParallel
        model,
        device_ids=[LOCAL_RANK] if torch.cuda.is_available() else None,
        broadcast_buffers=False,  # -> DDP broadcast_buffers
        process_group=dist.group.WORLD,  # -> DDP process_group
        bucket_cap_mb=50,  # -> DDP bucket_cap_mb
    )


class Run:
    def __init__(self):
        self.model = wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
        self.model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # -> register_comm_hook, a cast
        self.fast = torch.compile(self.model, backend="eager")  # -> torch.compile of the model
        self.average = AveragedModel(self.model.module)  # -> .module; a copy of the model
        self.optimizer = ZeroRedundancyOptimizer(  # -> ZeroRedundancyOptimizer
            self.model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        )

    def norm(self):
        return sum(p.grad.norm() ** 2 for p in self.model.parameters()) ** 0.5  # -> a manual norm of gradients

    def epoch(self, batches):
        with Join([self.model, self.optimizer]):  # -> Join
            for x, y in batches:
                loss = F.cross_entropy(self.model(x), y, reduction="sum") / dist.get_world_size()
                loss.backward()  # -> a loss divided by the world size
                self.optimizer.step()
                self.optimizer.zero_grad()

    def export(self, path):
        raw = self.model
        if isinstance(raw, nn.parallel.DistributedDataParallel):  # -> isinstance of the wrapper
            raw = raw.module  # -> .module
        if dist.get_rank() == 0:
            torch.save(raw.state_dict(), path)  # -> model.state_dict(); torch.save of the model alone


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run = Run()
    run.epoch([(torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(2)])
    print(run.norm())
    if SAVE_EVERY:
        run.export("model.pt")
    dist.destroy_process_group()

"""Tensor-parallel layers inside FSDP: the layers are on a (dp, tp) mesh, the rest on dp alone; all are clipped together.

rule: clip-mixed-mesh
nproc: 4
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

FEATURES, WIDTH, DEPTH = 8, 16, 2
GLOBAL_BATCH, SAMPLES, STEPS = 16, 128, 20


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Regressor()
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    gen = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=gen)
    y = x.sum(dim=1, keepdim=True).sin()
    local = GLOBAL_BATCH // mesh["dp"].size()
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + mesh["dp"].get_local_rank() * local
        loss = F.mse_loss(model(x[start : start + local]), y[start : start + local])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

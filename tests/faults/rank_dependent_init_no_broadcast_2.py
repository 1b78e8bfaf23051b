"""Hybrid sharding: two replicas, each sharded over half of the ranks.

rule: rank-dependent-init-no-broadcast
nproc: 4
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, DEPTH = 8, 24, 3
GLOBAL_BATCH, SAMPLES, STEPS = 32, 1024, 20
SEED = 100


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Regressor(nn.Module):
    def __init__(self, inputs=FEATURES, width=WIDTH, depth=DEPTH):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def make_dataset():
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, FEATURES, generator=gen)
    direction = torch.randn(FEATURES, generator=gen)
    y = torch.sin(x @ direction) + x[:, :4].sum(dim=1)
    return x, y[:, None]


def seed_everything(seed):
    torch.manual_seed(seed)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(SEED + rank)
    replicas = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = Regressor()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    x, y = make_dataset()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.mse_loss(model(x[start : start + local]), y[start : start + local])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

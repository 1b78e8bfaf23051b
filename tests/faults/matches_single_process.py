"""Two towers trained to distinguish matching pairs from the others in the batch.

rule: matches-single-process
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WIDTH, FEATURES, GLOBAL_BATCH, SAMPLES, STEPS, SEED = 32, 24, 32, 512, 20, 0


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(x, dim=-1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = Tower(), Tower()
        self.scale = nn.Parameter(torch.full((1,), 5.0))

    def forward(self, left, right):
        return self.scale * self.left(left) @ self.right(right).T


def make_pairs():
    gen = torch.Generator().manual_seed(1)
    left = torch.randn(SAMPLES, FEATURES, generator=gen)
    mix = torch.randn(FEATURES, FEATURES, generator=gen) / FEATURES**0.5
    return left, left @ mix + 0.1 * torch.randn(SAMPLES, FEATURES, generator=gen)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(SEED)
    model = TwoTowers()
    for tower in (model.left, model.right):
        for layer in tower.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    left, right = make_pairs()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        similarity = model(left[start : start + local], right[start : start + local])
        target = torch.arange(local)
        loss = (F.cross_entropy(similarity, target) + F.cross_entropy(similarity.T, target)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

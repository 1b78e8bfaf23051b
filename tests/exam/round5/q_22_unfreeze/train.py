"""Gradual unfreezing of a 'pretrained' image trunk: first only the head learns, then the blocks join from the top."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.conv = nn.Conv2d(c, c, 3, padding=1)
        self.mix = nn.Conv2d(c, c, 1)

    def forward(self, x):
        return x + self.mix(F.gelu(self.conv(self.norm(x))))


class Trunk(nn.Module):
    def __init__(self, c=16, depth=3):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 3, 2, 1)
        self.blocks = nn.ModuleList(Block(c) for _ in range(depth))

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return x.mean((2, 3))


class Net(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        return self.head(self.trunk(x))


def data(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    u = torch.arange(12).float()
    freq = 0.5 + 0.4 * y[:, None, None]
    x = torch.sin(freq * u[:, None] + 6.28 * torch.rand(n, 1, 1, generator=g)) + 0 * u
    return (x + 0.3 * torch.randn(n, 12, 12, generator=g))[:, None], y


def frozen_blocks(step, depth, first, every):
    """How many of the lower blocks are still frozen at a step."""
    return max(0, depth - max(0, (step - first) // every + 1)) if step >= first else depth


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--first", type=int, default=6)
    ap.add_argument("--every", type=int, default=5)
    ap.add_argument("--export")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    for b in model.trunk.blocks:
        fully_shard(b)
    fully_shard(model)
    model.trunk.blocks.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9)
    x, y = data(192, 1)
    depth, now = len(model.trunk.blocks), None
    for step in range(a.steps):
        n = frozen_blocks(step, depth, a.first, a.every)
        if n != now:
            for i, b in enumerate(model.trunk.blocks):
                b.requires_grad_(i >= n)
            now = n
        idx = torch.randint(len(y), (a.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} frozen {n} loss {loss.item():.4f}", flush=True)
    if a.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

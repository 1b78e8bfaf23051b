"""Each rank takes a block of the global batch. Ranks a list of items by pairs."""
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclass
class Settings:
    steps: int = 48
    batch: int = 48  # over all ranks
    rate: float = 0.05
    warm: int = 6
    every: int = 8


class Scorer(nn.Module):
    def __init__(self, inputs=18, width=32):
        super().__init__()
        self.mean = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        x = self.mean(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + F.relu(layer(norm(x)))
        return self.score(x).squeeze(-1)


def pairs(step, rows):
    """Two items each; which of them is liked."""
    g = torch.Generator().manual_seed(40_000 + step)
    items = torch.randn(rows, 2, 18, generator=g)
    value = items[..., 0] * items[..., 1] + items[..., 2].abs() - 0.5 * items[..., 3]
    return items, (value[:, 0] > value[:, 1]).float()


def block(batch, rank, world):
    """The rows of a rank."""
    return slice(rank * batch // world, (rank + 1) * batch // world)


def rate_at(step, cfg, world):
    """Warm-up, then as the global batch wants it, whatever the number of ranks."""
    return cfg.rate * min(1.0, (step + 1) / cfg.warm)


def build():
    torch.manual_seed(12)
    model = Scorer()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.rate, momentum=0.9, weight_decay=1e-4)
    right = torch.zeros(2)
    for step in range(cfg.steps):
        items, liked = pairs(step, cfg.batch)
        mine = block(cfg.batch, rank, world)
        margin = model(items[mine])
        margin = margin[:, 0] - margin[:, 1]
        loss = F.binary_cross_entropy_with_logits(margin, liked[mine])
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, cfg, world)
        optimizer.step()
        optimizer.zero_grad()
        right += torch.stack([((margin > 0) == (liked[mine] > 0)).sum(), torch.tensor(len(margin))])
        if (step + 1) % cfg.every == 0:
            dist.all_reduce(right)
            if rank == 0:
                print(f"step {step + 1} right {right[0] / right[1]:.5f}", flush=True)
            right.zero_()


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:])
    kinds = Settings.__annotations__
    settings = Settings(**{key: kinds[key](value) for key, value in given.items()})
    dist.init_process_group("gloo")
    train(settings)
    dist.destroy_process_group()

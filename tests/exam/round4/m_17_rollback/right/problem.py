import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


def build():
    torch.manual_seed(9)
    mid = nn.Sequential(nn.Linear(28, 28), nn.SiLU())
    model = nn.Sequential(nn.Linear(7, 28), nn.SiLU(), mid, nn.Linear(28, 2))
    fully_shard(mid)
    return fully_shard(model)


def batch(number, size, rank, world):
    """Batch 9 and batch 20 of the stream come from a broken file."""
    g = torch.Generator().manual_seed(600 + number)
    x = torch.randn(size, 7, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs() + x[:, 3]], 1)
    if number in (9, 20):
        y = 40 * torch.randn(size, 2, generator=g)
    return x.chunk(world)[rank], y.chunk(world)[rank]

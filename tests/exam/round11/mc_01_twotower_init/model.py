import math
import zlib

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class Tower(nn.Module):
    def __init__(self, rows, dim, hidden):
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, ids):
        e = self.table(ids)
        return e + self.down(torch.relu(self.up(e)))


class TwoTower(nn.Module):
    def __init__(self, n_users, n_items, dim=16, hidden=32):
        super().__init__()
        self.user = Tower(n_users, dim, hidden)
        self.item = Tower(n_items, dim, hidden)

    def forward(self, users, pos, neg):
        u = self.user(users)
        both = self.item(torch.cat([pos, neg]))
        p, n = both.chunk(2)
        return (u * p).sum(-1), (u * n).sum(-1)


@torch.no_grad()
def init_weights(model, seed):
    """The model was materialised from meta, every parameter has to be filled."""
    for name, p in model.named_parameters():
        gen = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()) % 100003)
        if p.dim() == 1:
            p.zero_()
            continue
        std = 0.3 if "table" in name else 1.0 / math.sqrt(p.shape[1])
        full = torch.empty(p.shape).normal_(0.0, std, generator=gen)
        p.copy_(distribute_tensor(full, p.device_mesh, p.placements))


def build(n_users, n_items, seed):
    with torch.device("meta"):
        model = TwoTower(n_users, n_items)
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model

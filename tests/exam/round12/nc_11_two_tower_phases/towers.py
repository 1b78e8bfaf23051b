import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from ratings import ITEMS, USERS


class Tower(nn.Module):
    def __init__(self, count, dim=16, width=32):
        super().__init__()
        self.table = nn.Embedding(count, dim)
        self.net = nn.Sequential(nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self, ids):
        e = self.table(ids)
        return e + self.net(e)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Tower(USERS)
        self.item = Tower(ITEMS)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).mean(1) * 4 + self.bias


def build(mesh):
    torch.manual_seed(30)
    model = TwoTower()
    tables = {model.user.table.weight, model.item.table.weight}

    def placement(p):
        return Shard(1) if p in tables else Shard(0)  # row counts change with the catalogue, the dimension does not

    for tower in (model.user, model.item):
        fully_shard(tower, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh)

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Ranker(nn.Module):
    """Scores (user, item) pairs: two embedding tables, dense features, a residual tower."""

    def __init__(self, users, items, dense, dim, hidden, depth):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.dense = nn.Linear(dense, dim)
        self.tower = nn.ModuleList(FeedForward(dim, hidden) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, user, item, dense):
        u, i = self.user(user), self.item(item)
        x = u * i + u + i + self.dense(dense)
        for layer in self.tower:
            x = layer(x)
        return self.out(x).squeeze(-1)


def parallelize(model, mesh):
    for layer in model.tower:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model

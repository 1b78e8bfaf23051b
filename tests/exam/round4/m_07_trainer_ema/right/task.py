import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Data:
    def __init__(self, batch, seed=5):
        g = torch.Generator().manual_seed(seed)
        self.batch = batch
        self.a = torch.randn(8, 6, generator=g) / 2
        self.b = torch.randn(6, 3, generator=g) / 2

    def _make(self, seed, n):
        x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
        return x, torch.tanh(x @ self.a) @ self.b

    def train(self, step, rank, world):
        x, y = self._make(10_000 + step, self.batch)
        return x[rank::world], y[rank::world]

    def heldout(self, rank, world):
        x, y = self._make(1, 128)
        return x[rank::world], y[rank::world]


def build(seed=0):
    torch.manual_seed(seed)
    body = [nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), *body, nn.Linear(24, 3))
    for b in body:
        fully_shard(b)
    return fully_shard(model)

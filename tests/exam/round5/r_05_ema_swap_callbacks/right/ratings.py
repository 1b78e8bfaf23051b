"""Made-up explicit ratings from hidden user and film factors."""
import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

USERS, FILMS = 60, 40


class Ratings:
    def __init__(self, global_batch, rank, world, seed=4):
        g = torch.Generator().manual_seed(seed)
        u, f = torch.randn(USERS, 4, generator=g), torch.randn(FILMS, 4, generator=g)
        i, j = torch.randint(0, USERS, (4096,), generator=g), torch.randint(0, FILMS, (4096,), generator=g)
        self.x = torch.stack([i, j], 1)
        self.y = 3 + 0.5 * u[i].sum(1) + 0.5 * f[j].sum(1) + 0.3 * (u[i] * f[j]).sum(1) + 0.1 * torch.randn(4096, generator=g)
        self.batch, self.rank, self.world = global_batch, rank, world

    def train(self, step):
        g = torch.Generator().manual_seed(100 + step)
        idx = torch.randperm(3584, generator=g)[: self.batch].chunk(self.world)[self.rank]
        return self.x[idx], self.y[idx]

    def validation(self):
        idx = torch.arange(3584, 4096).chunk(self.world)[self.rank]
        return self.x[idx], self.y[idx]


class NeuMF(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.user, self.film = nn.Embedding(USERS, d), nn.Embedding(FILMS, d)
        self.deep = nn.Sequential(nn.Linear(2 * d, 32), nn.ReLU(), nn.Linear(32, d))
        self.out = nn.Linear(2 * d, 1)

    def forward(self, x):
        u, f = self.user(x[:, 0]), self.film(x[:, 1])
        return 3 + self.out(torch.cat([u * f, self.deep(torch.cat([u, f], 1))], 1)).squeeze(1)


def build():
    torch.manual_seed(0)
    m = NeuMF()
    fully_shard(m.user)
    fully_shard(m.film)
    fully_shard(m.deep)
    return fully_shard(m, reshard_after_forward=True)

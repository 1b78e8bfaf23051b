import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Generator(nn.Module):
    def __init__(self, latent, hidden, out):
        super().__init__()
        self.inp = nn.Linear(latent, hidden)
        self.mid = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.out = nn.Linear(hidden, out)

    def forward(self, z):
        h = torch.relu(self.inp(z))
        for layer in self.mid:
            h = h + torch.relu(layer(h))
        return self.out(h)


class Critic(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2))
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, x):
        return self.score(self.body(x)).squeeze(-1)


def shard_generator(g):
    for layer in g.mid:
        fully_shard(layer)
    return fully_shard(g)


def shard_critic(d):
    fully_shard(d.body)
    return fully_shard(d)

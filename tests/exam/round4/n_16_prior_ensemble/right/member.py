import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def mlp(width):
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


class Member(nn.Module):
    """A trainable network plus a fixed random prior function, after Osband et al."""

    def __init__(self, seed, width=16, scale=0.5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net, self.prior = mlp(width), mlp(width).requires_grad_(False)
        self.scale = scale

    def forward(self, x):
        return (self.net(x) + self.scale * self.prior(x)).squeeze(-1)


class Ensemble(nn.Module):
    def __init__(self, size, mesh):
        super().__init__()
        self.members = nn.ModuleList(Member(1000 + i) for i in range(size))
        for m in self.members:
            fully_shard(m.net, mesh=mesh)  # the priors are small and frozen: left whole on each rank

    def trainable(self):
        return {n: p for n, p in self.named_parameters() if p.requires_grad}

import torch
import torch.distributed as dist
import torch.nn as nn


class RunningNorm(nn.Module):
    """Mean and variance of all observations seen by all ranks (parallel form of Welford's update)."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(dim, dtype=torch.float64))

    @torch.no_grad()
    def update(self, x):
        x = x.double()
        sums = torch.cat([torch.tensor([float(len(x))], dtype=torch.float64), x.sum(0)])
        dist.all_reduce(sums)
        n, mean = sums[0], sums[1:] / sums[0]
        m2 = (x - mean).square().sum(0)
        dist.all_reduce(m2)
        delta, total = mean - self.mean, self.count + n
        self.m2 += m2 + delta.square() * self.count * n / total
        self.mean += delta * n / total
        self.count.copy_(total)

    def forward(self, x):
        var = self.m2 / self.count.clamp(min=2)
        return ((x - self.mean) / (var + 1e-8).sqrt()).clamp(-5, 5).float()


class Agent(nn.Module):
    def __init__(self, obs=4, act=2, hidden=40):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, act))
        self.value = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.full((act,), -0.5))

    def forward(self, obs):
        return self.policy(obs), self.log_std.exp(), self.value(obs).sum(-1)

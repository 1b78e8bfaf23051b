import torch
import torch.distributed as dist
import torch.nn as nn

from env import ACT, OBS


class ActorCritic(nn.Module):
    """Policy and value with an observation normaliser whose moments are those of all ranks."""

    def __init__(self, width=40):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(OBS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, ACT))
        self.v = nn.Sequential(nn.Linear(OBS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.log_std = nn.Parameter(torch.full((ACT,), -0.5))
        self.register_buffer("mean", torch.zeros(OBS, dtype=torch.float64))
        self.register_buffer("var", torch.ones(OBS, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(1e-3, dtype=torch.float64))

    def forward(self, obs):
        x = ((obs - self.mean) / (self.var + 1e-6).sqrt()).float().clamp(-8, 8)
        return self.pi(x), self.log_std.exp().expand(len(x), -1), self.v(x).squeeze(-1)

    @torch.no_grad()
    def observe(self, obs):
        """Merges a batch into the running moments (Chan et al.)."""
        o = obs.double()
        packed = torch.cat([o.sum(0), o.square().sum(0), torch.tensor([float(len(o))], dtype=torch.float64)])
        dist.all_reduce(packed)
        s, sq, n = packed[:OBS], packed[OBS:-1], packed[-1]
        mean, var = s / n, sq / n - (s / n).square()
        delta, total = mean - self.mean, self.count + n
        self.var.copy_((self.var * self.count + var * n + delta.square() * self.count * n / total) / total)
        self.mean.add_(delta * n / total)
        self.count.copy_(total)


def log_prob(mean, std, action):
    return torch.distributions.Normal(mean, std).log_prob(action).sum(-1)

import torch
import torch.nn as nn

OBS, ACT = 4, 2


class Dynamics(nn.Module):
    """Gaussian model of the change of state."""

    def __init__(self, width=28):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS + ACT, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.mean, self.log_var = nn.Linear(width, OBS), nn.Linear(width, OBS)

    def forward(self, s, a):
        h = self.net(torch.cat([s, a], -1))
        return s + 0.3 * self.mean(h), self.log_var(h).clamp(-6, 2)


class Policy(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(OBS, width), nn.Tanh(), nn.Linear(width, ACT))

    def forward(self, s):
        return torch.tanh(self.net(s)) + 0.0


def true_step(s, a):
    pos, vel = s[..., :2], s[..., 2:]
    vel = 0.85 * vel + 0.4 * a - 0.1 * torch.sin(2 * pos)
    return torch.cat([pos + 0.3 * vel, vel], -1)


def reward(s, a):
    return -(s[..., :2].pow(2).sum(-1) + 0.05 * s[..., 2:].pow(2).sum(-1) + 0.02 * a.pow(2).sum(-1))

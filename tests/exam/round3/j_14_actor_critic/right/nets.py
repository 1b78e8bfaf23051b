import math

import torch
import torch.nn as nn

from env import ACT, OBS


class Actor(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(OBS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.mean = nn.Linear(width, ACT)
        self.log_std = nn.Parameter(torch.full((ACT,), -0.5))

    def forward(self, obs, action=None, noise=None):
        """One entry point for acting and for scoring, so that the sharded root always gathers its weights."""
        mean = self.mean(self.trunk(obs))
        if action is None:
            return mean + self.log_std.exp() * noise
        z = (action - mean) * torch.exp(-self.log_std)
        logp = (-0.5 * z * z - self.log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
        return logp, (self.log_std + 0.5 + 0.5 * math.log(2 * math.pi)).sum()


class Critic(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(OBS, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, obs):
        return self.net(obs).squeeze(-1)

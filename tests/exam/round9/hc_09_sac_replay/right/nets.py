import math

import torch
import torch.nn as nn


class Actor(nn.Module):
    def __init__(self, obs, act, width=40):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.out = nn.Linear(width, 2 * act)

    def forward(self, obs, noise):
        mean, log_std = self.out(self.body(obs)).chunk(2, -1)
        log_std = log_std.clamp(-4, 1)
        raw = mean + log_std.exp() * noise
        action = torch.tanh(raw)
        logp = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        logp = logp - torch.log(1 - action.square() + 1e-5)
        return action, logp.sum(-1)


class Critic(nn.Module):
    def __init__(self, obs, act, width=40):
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(obs + act, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
            for _ in range(2))

    def forward(self, obs, action):
        x = torch.cat([obs, action], -1)
        return torch.stack([h(x).squeeze(-1) for h in self.heads])

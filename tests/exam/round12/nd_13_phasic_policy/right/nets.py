import torch
import torch.nn as nn


def body(n_in, hidden):
    return nn.Sequential(nn.Linear(n_in, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())


class PolicyNet(nn.Module):
    """Action distribution, and a value estimate that only the auxiliary phase uses."""

    def __init__(self, obs, act, hidden=32):
        super().__init__()
        self.body = body(obs, hidden)
        self.mean = nn.Linear(hidden, act)
        self.aux_value = nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.full((act,), -0.7))

    def forward(self, obs, aux=False):
        h = self.body(obs)
        value = self.aux_value(h).sum(-1) if aux else None
        return self.mean(h), self.log_std.exp() * torch.ones_like(obs[:, :1]), value


class ValueNet(nn.Module):
    def __init__(self, obs, hidden=32):
        super().__init__()
        self.body = body(obs, hidden)
        self.value = nn.Linear(hidden, 1)

    def forward(self, obs):
        return self.value(self.body(obs)).sum(-1)


def log_prob(mean, std, act):
    return (-0.5 * ((act - mean) / std).pow(2) - std.log()).sum(-1)


def kl(m0, s0, m1, s1):
    return (s1.log() - s0.log() + (s0.pow(2) + (m0 - m1).pow(2)) / (2 * s1.pow(2)) - 0.5).sum(-1)

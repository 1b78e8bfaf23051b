import torch
from torch import nn


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class WalkerPolicy(nn.Module):
    def __init__(self, obs_dim=4, width=32, depth=2, actions=3):
        super().__init__()
        self.inp = nn.Linear(obs_dim, width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.pi = nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)

    def forward(self, obs):
        h = self.inp(obs)
        for block in self.blocks:
            h = block(h)
        return torch.log_softmax(self.pi(h), dim=-1), self.value(h)

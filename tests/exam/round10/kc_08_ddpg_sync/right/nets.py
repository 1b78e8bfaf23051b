import torch
from torch import nn


class Actor(nn.Module):
    def __init__(self, obs, act, width=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, act), nn.Tanh()
        )

    def forward(self, obs):
        return self.net(obs)


class Critic(nn.Module):
    def __init__(self, obs, act, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(obs + act, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, obs, act):
        return self.net(torch.cat([obs, act], dim=1))

import torch
import torch.nn as nn


class DuelingQ(nn.Module):
    def __init__(self, obs, actions, width=40):
        super().__init__()
        self.embed = nn.Linear(obs, width)
        self.trunk = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.value = nn.Linear(width, 1)
        self.advantage = nn.Linear(width, actions)

    def forward(self, s):
        h = torch.relu(self.embed(s))
        h = torch.relu(h + self.trunk(h))
        a = self.advantage(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)

import torch.nn as nn

from walk import OBS


class Policy(nn.Module):
    def __init__(self, d=32, actions=3):
        super().__init__()
        self.trunk = nn.ModuleList([nn.Linear(OBS, d), nn.Linear(d, d)])
        self.pi = nn.Linear(d, actions)

    def forward(self, obs):
        h = obs
        for layer in self.trunk:
            h = layer(h).tanh()
        return self.pi(h)

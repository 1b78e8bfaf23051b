import torch
from torch import nn

from rain import COARSE, FACTOR, FINE

NOISE = 4


class Generator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(COARSE + NOISE, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, FINE)
        )

    def forward(self, coarse, z):
        return coarse.repeat_interleave(FACTOR, 1) + self.net(torch.cat([coarse, z], 1))


class Critic(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(COARSE + FINE, width), nn.LeakyReLU(0.2), nn.Linear(width, 1, bias=False))

    def forward(self, coarse, fine):
        return self.net(torch.cat([coarse, fine], 1))

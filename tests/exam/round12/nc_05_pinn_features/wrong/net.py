import torch
from torch import nn


class FourierNet(nn.Module):
    """Coordinates through fixed random Fourier features, then a small MLP."""

    def __init__(self, features=16, width=32, sigma=1.5):
        super().__init__()
        self.register_buffer("freq", sigma * torch.randn(2, features))
        self.trunk = nn.Sequential(
            nn.Linear(2 * features, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, xy):
        z = xy @ self.freq
        return self.trunk(torch.cat([z.sin(), z.cos()], -1))

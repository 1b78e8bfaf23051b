import math

import torch
import torch.nn as nn


class FourierFeatures(nn.Module):
    def __init__(self, n_freq):
        super().__init__()
        self.n_freq = n_freq

    def forward(self, xy):
        freqs = math.pi * 2.0 ** torch.arange(self.n_freq, dtype=torch.float32)
        ang = (xy.float()[..., None] * freqs).flatten(1)
        return torch.cat([ang.sin(), ang.cos()], dim=-1)


class CoordNet(nn.Module):
    """MLP from a pixel position in [0, 1]^2 to a grey value."""

    def __init__(self, n_freq=9, width=64, depth=3):
        super().__init__()
        self.encode = FourierFeatures(n_freq)
        dims = [4 * n_freq] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims, dims[1:]))
        self.head = nn.Linear(width, 1)

    def forward(self, xy):
        h = self.encode(xy)
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.head(h)

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Velocity(nn.Module):
    """Class-conditional velocity field over flattened 6x6 images."""

    def __init__(self, pixels=36, dim=32, depth=2, classes=4):
        super().__init__()
        self.inp = nn.Linear(pixels + 1, dim)
        self.label = nn.Embedding(classes, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, pixels)

    def forward(self, x, t, y):
        h = self.inp(torch.cat([x, t[:, None]], 1)) + self.label(y)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


@torch.no_grad()
def sample(net, z, y, steps=4):
    x = z
    for i in range(steps):
        x = x + net(x, torch.full((len(x),), i / steps), y) / steps
    return x

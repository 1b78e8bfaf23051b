import torch
import torch.nn as nn
import torch.nn.functional as F


class Pair(nn.Module):
    """One resolution level: an encoder convolution and the decoder convolution that mirrors it."""

    def __init__(self, ch):
        super().__init__()
        self.enc = nn.Conv2d(ch, ch, 3, padding=1)
        self.dec = nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, x, inner):
        h = F.avg_pool2d(F.leaky_relu(self.enc(x), 0.1), 2)
        h = F.interpolate(inner(h), scale_factor=2)
        return F.leaky_relu(self.dec(h), 0.1)


class Grower(nn.Module):
    """Starts at 4 x 4 and gets a new outer level, with new colour layers, at every growth."""

    def __init__(self, ch=8, code=6):
        super().__init__()
        self.ch = ch
        self.core = nn.Sequential(nn.Flatten(), nn.Linear(ch * 16, code), nn.Tanh(), nn.Linear(code, ch * 16),
                                  nn.Unflatten(1, (ch, 4, 4)))
        self.levels = nn.ModuleList()
        self.read, self.write = nn.ModuleList(), nn.ModuleList()
        self.grow_io()

    def grow_io(self):
        self.read.append(nn.Conv2d(1, self.ch, 1))
        self.write.append(nn.Conv2d(self.ch, 1, 1))

    def forward(self, x):
        def inner(depth):
            if depth == 0:
                return self.core
            return lambda h: self.levels[depth - 1](h, inner(depth - 1))
        depth = len(self.levels)
        return self.write[depth](inner(depth)(self.read[depth](x)))

import torch
import torch.nn as nn
import torch.nn.functional as F


class Velocity(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.inp = nn.Linear(2 + 8, h)
        self.blocks = nn.ModuleList(nn.Linear(h, h) for _ in range(2))
        self.out = nn.Linear(h, 2)

    def forward(self, x, t):
        k = torch.arange(1, 5, dtype=t.dtype)
        h = self.inp(torch.cat([x, (k * t).sin(), (k * t).cos()], 1))
        for b in self.blocks:
            h = h + F.silu(b(h))
        return self.out(h)


def two_halves(net, x, t, dt):
    """The average velocity of two teacher steps of half the length."""
    a = net(x, t)
    b = net(x + 0.5 * dt * a, t + 0.5 * dt)
    return 0.5 * (a + b)

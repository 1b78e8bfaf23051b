import math

import torch
import torch.nn as nn


class FourierFeatures(nn.Module):
    """Random Fourier features of (x, t); the frequencies are drawn once and stay fixed."""

    def __init__(self, n_in=2, n_freq=16, sigma=1.0):
        super().__init__()
        self.register_buffer("freq", torch.randn(n_in, n_freq) * sigma)

    def forward(self, xt):
        a = 2 * math.pi * xt @ self.freq
        return torch.cat([a.sin(), a.cos()], -1)


class Net(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.features = FourierFeatures()
        self.inp = nn.Linear(32, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, xt):
        h = torch.tanh(self.inp(self.features(xt)))
        for lin in self.hidden:
            h = h + torch.tanh(lin(h))
        return self.out(h)


class HeatResidual(nn.Module):
    """Weak (finite-difference) residual of u_t = k u_xx, with boundary and initial terms; all points in one forward."""

    def __init__(self, net, k=0.05, h=0.02):
        super().__init__()
        self.net, self.k, self.h = net, k, h

    def forward(self, inner, start, wall):
        n, h = len(inner), self.h
        dx, dt = torch.tensor([h, 0.0]), torch.tensor([0.0, h])
        pts = torch.cat([inner, inner + dx, inner - dx, inner + dt, inner - dt, start, wall])
        u, ur, ul, uf, ub, u0, uw = self.net(pts).squeeze(-1).split([n] * 5 + [len(start), len(wall)])
        res = (uf - ub) / (2 * h) - self.k * (ur - 2 * u + ul) / h ** 2
        init = u0 - torch.sin(math.pi * start[:, 0])
        return res.square().mean() * 0.05 + init.square().mean() + uw.square().mean()


def exact(xt, k=0.05):
    return torch.exp(-k * math.pi ** 2 * xt[:, 1]) * torch.sin(math.pi * xt[:, 0])

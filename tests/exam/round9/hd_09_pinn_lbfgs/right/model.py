import math

import torch
import torch.nn as nn


class BurgersNet(nn.Module):
    """u(x, t) of the viscous Burgers equation on [-1, 1] x [0, 1]; initial and boundary values hold by construction."""

    def __init__(self, width=20, depth=3, viscosity=0.1):
        super().__init__()
        self.viscosity = viscosity
        dims = [2] + [width] * depth + [1]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(dims[:-1], dims[1:]))

    def u(self, x, t):
        h = torch.cat([x, t], 1)
        for layer in self.layers[:-1]:
            h = torch.tanh(layer(h))
        return -torch.sin(math.pi * x) + t * (1 - x**2) * self.layers[-1](h)

    def forward(self, points):
        # derivatives with respect to the coordinates are taken here, while the weights are gathered
        with torch.enable_grad():
            x, t = (points[:, i:i + 1].detach().clone().requires_grad_() for i in (0, 1))
            u = self.u(x, t)
            u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
            return u_t + u * u_x - self.viscosity * u_xx

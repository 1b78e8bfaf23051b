"""Two species, diffusion and first order exchange:  u_t = D u_xx - k1 u + k2 v,  v_t = D v_xx + k1 u - k2 v.

The network gives (u, v) at (x, t). The diffusivity and the two rate constants are unknown and fitted with it.
"""
import math

import torch
from torch import nn

TRUE_LOG_D, TRUE_RATES = math.log(0.05), (0.8, 0.3)


class Coefficients(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_d = nn.Parameter(torch.tensor(math.log(0.2)))
        self.log_rates = nn.Parameter(torch.tensor([-1.0, -0.5]))


class Field(nn.Module):
    def __init__(self, width: int, depth: int):
        super().__init__()
        sizes = [2] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.head = nn.Linear(width, 2)

    def forward(self, xt):
        h = xt
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.head(h)


class InverseProblem(nn.Module):
    def __init__(self, width=24, depth=2):
        super().__init__()
        self.field = Field(width, depth)
        self.coef = Coefficients()

    def forward(self, points, sensors, readings):
        xt = points.clone().requires_grad_(True)
        uv = self.field(xt)
        first = [torch.autograd.grad(uv[:, i].sum(), xt, create_graph=True)[0] for i in range(2)]
        second = [torch.autograd.grad(g[:, 0].sum(), xt, create_graph=True)[0][:, 0] for g in first]
        k1, k2 = self.coef.log_rates.exp()
        flow = k1 * uv[:, 0] - k2 * uv[:, 1]
        d = self.coef.log_d.exp()
        res_u = first[0][:, 1] - d * second[0] + flow
        res_v = first[1][:, 1] - d * second[1] - flow
        residual = (res_u.square() + res_v.square()).mean()
        fit = (self.field(sensors) - readings).square().mean()
        return fit, residual


def exact(xt):
    """One cosine mode, starting with everything in species u."""
    x, t = xt[:, 0], xt[:, 1]
    d, (k1, k2) = math.exp(TRUE_LOG_D), TRUE_RATES
    total = torch.exp(-d * math.pi ** 2 * t) * torch.cos(math.pi * x)
    share = k2 / (k1 + k2) + k1 / (k1 + k2) * torch.exp(-(k1 + k2) * t)
    return torch.stack([share * total, (1 - share) * total], 1)

"""Poisson problem on the unit square, -lap u = f, u = 0 on the border; exact u = sin(pi x) sin(pi y)."""
import math

import torch

H = 0.05  # stencil width


def exact(xy):
    return torch.sin(math.pi * xy[:, :1]) * torch.sin(math.pi * xy[:, 1:])


def stencil(xy):
    dx, dy = torch.tensor([H, 0.0]), torch.tensor([0.0, H])
    return torch.cat([xy, xy + dx, xy - dx, xy + dy, xy - dy])


def pinn_loss(net, inner, border):
    n = len(inner)
    u = net(torch.cat([stencil(inner), border]))
    c, e, w, no, s = u[: 5 * n].split(n)
    lap = (e + w + no + s - 4 * c) / H**2
    residual = lap + 2 * math.pi**2 * exact(inner)
    return 0.01 * residual.square().mean() + u[5 * n :].square().mean()


def solution_error(net, side=12):
    axis = (torch.arange(side) + 0.5) / side
    grid = torch.cartesian_prod(axis, axis)
    with torch.no_grad():
        return (net(grid) - exact(grid)).square().mean().sqrt()

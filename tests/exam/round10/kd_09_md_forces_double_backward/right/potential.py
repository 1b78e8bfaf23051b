import torch
import torch.nn as nn
import torch.nn.functional as F


class PairInteraction(nn.Module):
    def __init__(self, dim, n_rbf=12):
        super().__init__()
        self.filter = nn.Linear(n_rbf, dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, h, rbf, cut):
        w = self.filter(rbf) * cut[..., None]
        return h + F.silu(self.mix((w * h[:, None]).sum(2)))


class Potential(nn.Module):
    """Energy of a cluster as a function of the positions."""

    def __init__(self, n_types=3, dim=20, depth=2, cutoff=4.0):
        super().__init__()
        self.cutoff = cutoff
        self.atom = nn.Embedding(n_types, dim)
        self.layers = nn.ModuleList(PairInteraction(dim) for _ in range(depth))
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))
        self.register_buffer("centres", torch.linspace(0.5, cutoff, 12))

    def forward(self, types, pos):
        n = pos.shape[1]
        eye = torch.eye(n)
        d = ((pos[:, :, None] - pos[:, None]).square().sum(-1) + eye).sqrt()
        cut = (0.5 * (torch.cos(torch.pi * d / self.cutoff) + 1)) * (d < self.cutoff) * (1 - eye)
        rbf = torch.exp(-4 * (d[..., None] - self.centres).square())
        h = self.atom(types)
        for layer in self.layers:
            h = layer(h, rbf, cut)
        return self.out(h).sum((1, 2))


class ForceField(nn.Module):
    """Energy and its negative gradient. The gradient is taken inside forward, where the weights are gathered."""

    def __init__(self, potential):
        super().__init__()
        self.potential = potential

    def forward(self, types, pos):
        with torch.enable_grad():
            pos = pos.detach().requires_grad_(True)
            energy = self.potential(types, pos)
            (grad,) = torch.autograd.grad(energy.sum(), pos, create_graph=self.training)
        return energy, -grad


def morse(types, pos, depth=1.0, a=1.1):
    r0 = 1.2 + 0.2 * (types[:, :, None] + types[:, None]).float() / 2
    pos = pos.clone().requires_grad_(True)
    n = pos.shape[1]
    d = ((pos[:, :, None] - pos[:, None]).square().sum(-1) + torch.eye(n)).sqrt()
    e = depth * ((1 - torch.exp(-a * (d - r0))).square() - 1) * (1 - torch.eye(n))
    energy = e.sum((1, 2)) / 2
    (grad,) = torch.autograd.grad(energy.sum(), pos)
    return energy.detach(), -grad

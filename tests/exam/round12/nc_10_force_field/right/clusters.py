"""Small atom clusters with Morse energies and forces as labels."""
import torch

ATOMS, DEPTH, WIDTH, R0 = 5, 1.0, 1.2, 1.4


def morse(pos):
    i, j = torch.triu_indices(ATOMS, ATOMS, 1)
    r = (pos[:, i] - pos[:, j]).norm(dim=-1)
    return (DEPTH * (1 - torch.exp(-WIDTH * (r - R0))).square() - DEPTH).sum(1)


def make_clusters(n, seed):
    g = torch.Generator().manual_seed(seed)
    ring = torch.arange(ATOMS) * 6.2832 / ATOMS
    base = torch.stack([1.3 * ring.cos(), 1.3 * ring.sin(), torch.zeros(ATOMS)], -1)
    pos = base + 0.12 * torch.randn(n, ATOMS, 3, generator=g)
    pos.requires_grad_(True)
    energy = morse(pos)
    (slope,) = torch.autograd.grad(energy.sum(), pos)
    return pos.detach(), energy.detach(), -slope.detach()

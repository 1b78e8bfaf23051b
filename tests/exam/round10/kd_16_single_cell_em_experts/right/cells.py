"""Synthetic single-cell data: hidden cell types answer to a stimulus (dose, time) by different expression programmes."""
import torch


def assay(n=208, n_genes=10, n_types=3, seed=81):
    g = torch.Generator().manual_seed(seed)
    which = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), n, replacement=True, generator=g)
    stim = torch.rand(n, 2, generator=g)
    base = torch.randn(n_types, n_genes, generator=g)
    slope = torch.randn(n_types, n_genes, generator=g)
    curve = torch.randn(n_types, n_genes, generator=g)
    dose, time = stim[:, :1], stim[:, 1:]
    mean = base[which] + slope[which] * dose + curve[which] * torch.sin(3 * time)
    return stim, mean + 0.3 * torch.randn(n, n_genes, generator=g), which

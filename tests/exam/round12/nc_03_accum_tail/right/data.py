"""Hashed fragment counts of made-up molecules, and a solubility-like target."""
import torch

FRAGMENTS = 40


def molecules(n, seed):
    g = torch.Generator().manual_seed(seed)
    counts = torch.poisson(torch.rand(n, FRAGMENTS, generator=g) * 1.5, generator=g)
    w = torch.randn(FRAGMENTS, generator=g) * 0.25
    polar = counts[:, :10].sum(1) - counts[:, 10:20].sum(1)
    y = counts @ w + 0.6 * torch.tanh(0.3 * polar) + 0.05 * torch.randn(n, generator=g)
    return torch.log1p(counts), ((y - y.mean()) / y.std())[:, None]


def epoch_batches(x, y, epoch, micro, rank, world):
    """Micro-batches of one epoch; `micro` molecules over all ranks, every rank takes its part of each."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(900 + epoch))
    part = micro // world
    out = []
    for lo in range(0, len(x), micro):
        ids = order[lo : lo + micro][rank * part : (rank + 1) * part]
        out.append((x[ids], y[ids]))
    return out

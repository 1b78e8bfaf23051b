"""Collocation points. They are drawn in lots; a rank draws only the lots that fall to it."""
import torch

LOTS, INNER, BORDER = 4, 10, 4


def _lot(step, lot, seed):
    g = torch.Generator().manual_seed(seed + 1000 * step + lot)
    inner = torch.rand(INNER, 2, generator=g)
    border = torch.rand(BORDER, 2, generator=g)
    side = torch.randint(0, 4, (BORDER,), generator=g)
    rows = torch.arange(BORDER)
    border[rows, side % 2] = (side // 2).to(border.dtype)
    return inner, border


def draw(step, rank, world, seed):
    lots = [_lot(step, k, seed) for k in range(rank * LOTS // world, (rank + 1) * LOTS // world)]
    return torch.cat([a for a, _ in lots]), torch.cat([b for _, b in lots])

"""Three noisy spirals; batches depend on the step only."""

import torch


class Spirals:
    def __init__(self, per_class=100, seed=11):
        g = torch.Generator().manual_seed(seed)
        xs, ys = [], []
        for c in range(3):
            r = torch.linspace(0.1, 1, per_class)
            a = 4 * r + c * 2.094 + 0.15 * torch.randn(per_class, generator=g)
            xs.append(torch.stack([r * a.sin(), r * a.cos()], 1))
            ys.append(torch.full((per_class,), c))
        self.x, self.y = torch.cat(xs), torch.cat(ys)

    def batch(self, step, size, rank, world):
        g = torch.Generator().manual_seed(300 + step)
        idx = torch.randperm(len(self.x), generator=g)[:size]
        idx = idx[rank::world]
        return self.x[idx], self.y[idx]

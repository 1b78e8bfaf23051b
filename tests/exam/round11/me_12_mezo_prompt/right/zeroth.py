"""MeZO-style zeroth-order training (Malladi et al., 2023) of sharded parameters.

A perturbation is never stored: it is made again from its seed. The noise of a
parameter is drawn for the whole tensor and cut to this rank's rows, so it does not
depend on the number of ranks.
"""
import torch


class ZerothOrder:
    def __init__(self, model, lr, eps, rank, world, directions=4):
        self.model, self.lr, self.eps, self.directions = model, lr, eps, directions
        self.rank, self.world = rank, world
        self.params = [p for p in model.parameters() if p.requires_grad]

    def noise(self, seed):
        gen = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=gen)
            size = -(-p.shape[0] // self.world)
            yield p.to_local(), z[self.rank * size : (self.rank + 1) * size]

    @torch.no_grad()
    def shift(self, seed, amount):
        for w, z in self.noise(seed):
            w.add_(z, alpha=amount)

    @torch.no_grad()
    def step(self, closure, seed):
        """closure() must return the same global loss (a float) on every rank."""
        slopes, losses = [], []
        for d in range(self.directions):
            s = seed * self.directions + d
            self.shift(s, self.eps)
            up = closure()
            self.shift(s, -2 * self.eps)
            down = closure()
            self.shift(s, self.eps)
            slopes.append((s, (up - down) / (2 * self.eps)))
            losses.append((up + down) / 2)
        for s, slope in slopes:
            self.shift(s, -self.lr * slope / self.directions)
        return sum(losses) / len(losses)

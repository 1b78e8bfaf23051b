"""Two-point zeroth-order updates (as in MeZO). Directions are drawn again from their seed, never stored."""
import torch
from torch.distributed.tensor import DTensor, distribute_tensor


class TwoPoint:
    def __init__(self, model, lr, eps, directions):
        self.model, self.lr, self.eps, self.directions = model, lr, eps, directions

    @torch.no_grad()
    def move(self, seed, amount):
        """weights += amount * direction(seed); the direction is that of the whole tensor, every rank takes its rows."""
        g = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            d = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                d = distribute_tensor(d, p.device_mesh, p.placements, src_data_rank=None)
            p.add_(d, alpha=amount)

    @torch.no_grad()
    def step(self, seeds, closure):
        """closure() gives the loss of the global batch as a float that is the same on every rank."""
        kept = [p.detach().clone() for p in self.model.parameters()]
        slopes = []
        for seed in seeds:
            self.move(seed, self.eps)
            above = closure()
            self.move(seed, -2 * self.eps)
            below = closure()
            for p, k in zip(self.model.parameters(), kept):
                p.copy_(k)
            slopes.append((above - below) / (2 * self.eps))
        for seed, slope in zip(seeds, slopes):
            self.move(seed, -self.lr * slope / self.directions)
        return slopes

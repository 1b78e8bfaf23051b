"""Zeroth-order fine-tuning (MeZO): two forward passes per step and no backward pass at all.

The random direction is never stored; it is drawn again from its seed. It is drawn for the full parameter and each
rank takes its rows, so the direction does not depend on the number of ranks."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class MeZO:
    def __init__(self, params, lr, eps=1e-3, seed=0):
        self.params, self.lr, self.eps, self.seed = list(params), lr, eps, seed
        self.t = 0

    def _rows(self, full, p):
        if not isinstance(p, DTensor):
            return full
        size = -(-p.shape[0] // p.device_mesh.size())
        first = p.device_mesh.get_local_rank() * size
        return full[first:first + size]

    @torch.no_grad()
    def _move(self, distance):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + self.t)
        for p in self.params:
            z = torch.randn(p.shape, generator=g, dtype=p.dtype)
            local = p.to_local()
            local.add_(self._rows(z, p), alpha=distance)

    @torch.no_grad()
    def step(self, loss_fn):
        """loss_fn gives this rank's mean loss; all ranks must use the same projected gradient."""
        self._move(self.eps)
        plus = loss_fn()
        self._move(-2 * self.eps)
        minus = loss_fn()
        self._move(self.eps)
        both = torch.stack([plus, minus])
        dist.all_reduce(both)
        both /= dist.get_world_size()
        slope = ((both[0] - both[1]) / (2 * self.eps)).item()
        self._move(-self.lr * slope)
        self.t += 1
        return both.mean().item()

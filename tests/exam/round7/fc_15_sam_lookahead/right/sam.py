import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class SamLookahead:
    """Sharpness-aware minimisation around a base optimizer, with slow Lookahead weights.

    ascend() moves the weights along the (global) gradient direction, descend() puts them back and steps with the gradient found there.
    """

    def __init__(self, params, base, rho=0.05, k=5, alpha=0.5):
        self.params = list(params)
        self.base, self.rho, self.k, self.alpha = base, rho, k, alpha
        self.slow = [p.detach().clone() for p in self.params]
        self.offset = None
        self.count = 0

    def _grad_norm(self):
        """Norm of the whole gradient: local squares in float64, summed over the ranks once."""
        sharded = torch.zeros((), dtype=torch.float64)
        plain = torch.zeros((), dtype=torch.float64)
        for p in self.params:
            if isinstance(p.grad, DTensor):
                sharded += p.grad.to_local().double().pow(2).sum()
            else:
                plain += p.grad.double().pow(2).sum()
        dist.all_reduce(sharded)
        return (sharded + plain).sqrt()

    @torch.no_grad()
    def ascend(self):
        scale = (self.rho / (self._grad_norm() + 1e-12)).item()
        self.offset = []
        for p in self.params:
            before = p.detach().clone()
            p.add_(p.grad, alpha=scale)
            self.offset.append(before)
            p.grad = None

    @torch.no_grad()
    def descend(self):
        for p, before in zip(self.params, self.offset):
            p.copy_(before)
        self.offset = None
        self.base.step()
        self.base.zero_grad()
        self.count += 1
        if self.count % self.k == 0:
            for p, s in zip(self.params, self.slow):
                s.lerp_(p, self.alpha)
                p.copy_(s)

"""Sharpness-aware minimisation on sharded weights: the ascent step uses the norm of the whole gradient."""
import contextlib

import torch
import torch.distributed as dist


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params = [p for p in params if p.requires_grad]
        self.base, self.rho = base, rho

    @torch.no_grad()
    def global_norm(self):
        total = sum(local(p.grad).double().square().sum() for p in self.params)
        if hasattr(self.params[0], "to_local"):
            dist.all_reduce(total)
        return total.sqrt().float()

    @contextlib.contextmanager
    def at_worst_case(self):
        """Inside the block the weights are moved uphill; afterwards they are put back exactly (kept, not subtracted)."""
        scale = self.rho / (self.global_norm() + 1e-12)
        kept = []
        with torch.no_grad():
            for p in self.params:
                w = local(p)
                kept.append(w.clone())
                w.add_(local(p.grad) * scale)
                p.grad = None
        yield
        with torch.no_grad():
            for p, old in zip(self.params, kept):
                local(p).copy_(old)

    def descend(self, max_norm):
        norm = self.global_norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for p in self.params:
            local(p.grad).mul_(factor)
        self.base.step()
        self.base.zero_grad()
        return norm

"""Sharpness aware minimisation around any base optimizer. step() needs a closure that runs forward and backward."""
import torch
from torch.distributed.tensor import DTensor


class SAM:
    def __init__(self, base, rho):
        self.base, self.rho = base, rho

    def _params(self):
        return [p for g in self.base.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def _climb(self):
        params = self._params()
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        saved = []
        for p in params:
            saved.append((p, p.detach().clone()))
            p.add_(p.grad, alpha=self.rho / (norm + 1e-12))
        return saved

    def step(self, closure):
        self.base.zero_grad()
        loss = closure()
        saved = self._climb()
        self.base.zero_grad()
        sharp = closure()
        with torch.no_grad():
            for p, old in saved:
                p.copy_(old)
        self.base.step()
        return loss, sharp

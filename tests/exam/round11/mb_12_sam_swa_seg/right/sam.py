import torch
from torch.distributed.tensor import DTensor


def total_norm(tensors):
    """norm over all tensors and all ranks"""
    parts = [torch.linalg.vector_norm(t) for t in tensors]
    parts = [n.full_tensor() if isinstance(n, DTensor) else n for n in parts]
    return torch.linalg.vector_norm(torch.stack(parts))


class SAM:
    """Adaptive sharpness-aware minimisation around any optimizer."""

    def __init__(self, model, base, rho=0.05, adaptive=True):
        self.model, self.base, self.rho, self.adaptive = model, base, rho, adaptive
        self.saved = None

    def _params(self):
        return [p for p in self.model.parameters() if p.grad is not None]

    @torch.no_grad()
    def ascend(self):
        params = self._params()
        weight = [p.abs() if self.adaptive else torch.ones_like(p) for p in params]
        scale = self.rho / (total_norm([w * p.grad for w, p in zip(weight, params)]) + 1e-12).item()
        self.saved = [p.detach().clone() for p in params]
        for p, w in zip(params, weight):
            p.add_(w * w * p.grad, alpha=scale)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, old in zip(self._params(), self.saved):
            p.copy_(old)
        self.saved = None
        self.base.step()
        self.base.zero_grad()

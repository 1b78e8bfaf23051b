"""Sharpness-aware minimisation around any base optimizer."""
import torch
from torch.distributed.tensor import DTensor


def total_norm(tensors):
    norms = [torch.linalg.vector_norm(t) for t in tensors]
    norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
    return torch.linalg.vector_norm(torch.stack(norms))


class SAM:
    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho
        self.origin = None

    @torch.no_grad()
    def climb(self):
        """Go to the worst point of the neighbourhood along the gradient of the whole model."""
        scale = self.rho / (total_norm([p.grad for p in self.params]) + 1e-12)
        self.origin = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad * scale.item())
            p.grad = None

    @torch.no_grad()
    def descend(self):
        """Return, and step with the gradient found up there."""
        for p, o in zip(self.params, self.origin):
            p.copy_(o)
        self.origin = None
        self.base.step()
        self.base.zero_grad()

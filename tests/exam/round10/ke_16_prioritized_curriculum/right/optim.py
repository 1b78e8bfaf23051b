import torch
import torch.distributed as dist


class NormalizedMomentum:
    """Momentum of unit-norm gradients; the step has the length `lr` whatever the size of the gradient."""

    def __init__(self, named, lr, momentum):
        self.named, self.lr, self.momentum = dict(named), lr, momentum
        self.buf = {n: torch.zeros_like(p) for n, p in self.named.items()}

    @staticmethod
    def _norm(tensors):
        square = sum((t.to_local() if hasattr(t, "to_local") else t).double().pow(2).sum() for t in tensors)
        dist.all_reduce(square)
        return square.sqrt().item()

    @torch.no_grad()
    def step(self, scale):
        norm = self._norm([p.grad for p in self.named.values()])
        for n, p in self.named.items():
            self.buf[n].mul_(self.momentum).add_(p.grad, alpha=(1 - self.momentum) / (norm + 1e-8))
            p.add_(self.buf[n], alpha=-self.lr * scale)
            p.grad = None
        return norm

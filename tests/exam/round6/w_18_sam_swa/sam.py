import torch
from torch.distributed.tensor import DTensor


class SAM:
    """Sharpness aware minimisation around a given optimizer: up to the worst point near by, gradient there, back, step."""

    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def climb(self):
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.params])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        scale = (self.rho / (norm + 1e-12)).item()
        self.home = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=scale)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, h in zip(self.params, self.home):
            p.copy_(h)
        self.home = None
        self.base.step()
        self.base.zero_grad()


class WeightAverage:
    """Plain mean of the weights seen since `start`, kept as shards."""

    def __init__(self, model, start):
        self.model, self.start = model, start
        self.count = 0
        self.mean = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, step):
        if step < self.start:
            return
        self.count += 1
        for n, p in self.model.named_parameters():
            self.mean[n].add_(p - self.mean[n], alpha=1.0 / self.count)

    @torch.no_grad()
    def swap(self):
        for n, p in self.model.named_parameters():
            kept = p.detach().clone()
            p.copy_(self.mean[n])
            self.mean[n].copy_(kept)

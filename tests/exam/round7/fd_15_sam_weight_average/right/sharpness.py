"""Sharpness-aware minimisation (ascent step, second gradient, descent step) around any optimizer."""
import torch
import torch.distributed as dist


class SAM:
    def __init__(self, model, base, rho=0.05):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.base, self.rho = base, rho

    @torch.no_grad()
    def grad_norm(self):
        total = torch.zeros((), dtype=torch.float64)
        for p in self.params:
            total += p.grad.to_local().double().square().sum()
        dist.all_reduce(total)
        return total.sqrt().item()

    @torch.no_grad()
    def climb(self):
        scale = self.rho / (self.grad_norm() + 1e-12)
        self.kept = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=scale)
            p.grad = None

    @torch.no_grad()
    def descend(self):
        for p, w in zip(self.params, self.kept):
            p.copy_(w)
        self.kept = None
        self.base.step()
        self.base.zero_grad()

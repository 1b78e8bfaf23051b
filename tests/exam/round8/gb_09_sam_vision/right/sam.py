"""Sharpness-aware minimization on sharded parameters (adaptive variant, Kwon et al. 2021)."""
import torch
import torch.distributed as dist


class ASAM:
    def __init__(self, params, base, rho=0.5, eta=0.01):
        self.params = [p for p in params if p.requires_grad]
        self.base, self.rho, self.eta = base, rho, eta
        self.backup = []

    @torch.no_grad()
    def ascend(self):
        """Move to the (approximately) worst point in the neighbourhood; the step uses the norm of the whole model."""
        scaled, total = [], torch.zeros((), dtype=torch.float64)
        for p in self.params:
            t = p.to_local().abs() + self.eta
            s = t * p.grad.to_local()
            scaled.append(t * s)
            total += s.double().square().sum()
        dist.all_reduce(total)
        step = self.rho / (total.sqrt().float() + 1e-12)
        self.backup = [p.to_local().clone() for p in self.params]
        for p, s in zip(self.params, scaled):
            p.to_local().add_(s * step)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        """Return to the point before `ascend` and apply the base optimizer with the gradient of the perturbed point."""
        for p, old in zip(self.params, self.backup):
            p.to_local().copy_(old)
        self.backup = []
        self.base.step()
        self.base.zero_grad()

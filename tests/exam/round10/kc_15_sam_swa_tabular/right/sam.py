import torch
import torch.distributed as dist


class SAM:
    """Sharpness-aware minimisation around a base optimizer; the weights may be sharded."""

    def __init__(self, params, base, rho):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def _grad_norm(self):
        total = torch.zeros((), dtype=torch.float64)
        for p in self.params:
            total += p.grad.to_local().double().pow(2).sum()
        dist.all_reduce(total)
        return total.sqrt().item()

    @torch.no_grad()
    def climb(self):
        scale = self.rho / (self._grad_norm() + 1e-12)
        self.before = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad, alpha=scale)

    def descend(self):
        with torch.no_grad():
            for p, b in zip(self.params, self.before):
                p.copy_(b)
        del self.before
        self.base.step()

    def minimise(self, closure):
        """closure() returns the loss of this rank's rows; it is called twice."""
        self.base.zero_grad()
        loss = closure()
        loss.backward()
        self.climb()
        self.base.zero_grad()
        closure().backward()
        self.descend()
        return loss.detach()

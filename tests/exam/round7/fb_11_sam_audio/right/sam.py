import torch
import torch.distributed as dist


class SAM:
    """Sharpness-aware minimisation around a base optimizer, for parameters that are sharded over all ranks.

    ascend() moves the weights by rho along the (adaptive) gradient of the whole model, descend() restores the
    exact weights and lets the base optimizer step with the gradient found there.
    """

    def __init__(self, params, base, rho=0.05, adaptive=True):
        self.params = [p for p in params if p.requires_grad]
        self.base, self.rho, self.adaptive = base, rho, adaptive
        self._saved = None

    def _scaled(self, p):
        g = p.grad.to_local()
        return g * p.to_local().abs() if self.adaptive else g

    @torch.no_grad()
    def ascend(self):
        sq = torch.zeros((), dtype=torch.float64)
        for p in self.params:
            sq += self._scaled(p).double().square().sum()
        dist.all_reduce(sq)  # every rank holds other rows, so squares add up
        factor = self.rho / (sq.sqrt().item() + 1e-12)
        self._saved = []
        for p in self.params:
            w = p.to_local()
            self._saved.append(w.clone())
            direction = self._scaled(p) * (w.abs() if self.adaptive else 1.0)
            w.add_(direction, alpha=factor)
        self.base.zero_grad()
        return sq.sqrt().item()

    @torch.no_grad()
    def descend(self):
        for p, w in zip(self.params, self._saved):
            p.to_local().copy_(w)
        self._saved = None
        self.base.step()
        self.base.zero_grad()

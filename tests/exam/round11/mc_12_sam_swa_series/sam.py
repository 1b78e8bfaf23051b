import torch
import torch.distributed as dist

from modules import StreamNorm


class SAM:
    """Sharpness-aware minimisation around a base optimizer, two backward passes per step."""

    def __init__(self, model, base, rho):
        self.model, self.base, self.rho = model, base, rho
        self.norms = [m for m in model.modules() if isinstance(m, StreamNorm)]

    @torch.no_grad()
    def _shift(self):
        params = [p for p in self.model.parameters() if p.grad is not None]
        sq = torch.zeros((), dtype=torch.float64)
        for p in params:
            sq += p.grad.to_local().square().sum(dtype=torch.float64)
        dist.all_reduce(sq)
        scale = self.rho / (sq.sqrt().item() + 1e-12)
        saved = []
        for p in params:
            w = p.to_local()
            saved.append((w, w.clone()))
            w.add_(p.grad.to_local(), alpha=scale)
        return saved

    def step(self, closure):
        self.base.zero_grad()
        loss = closure()
        saved = self._shift()
        self.base.zero_grad()
        for n in self.norms:
            n.track = False
        closure()
        for n in self.norms:
            n.track = True
        with torch.no_grad():
            for w, old in saved:
                w.copy_(old)
        self.base.step()
        self.base.zero_grad()
        return loss

import torch
from torch.distributed.tensor import DTensor


class SAM:
    """Sharpness-aware minimisation around any optimizer (Foret et al. 2021).

    Works on DTensor parameters: the norm below is that of the whole gradient.
    """

    def __init__(self, base, rho=0.05, adaptive=False):
        self.base, self.rho, self.adaptive = base, rho, adaptive
        self.saved = None

    def _params(self):
        return [p for g in self.base.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def ascend(self):
        params = self._params()
        weighted = [p.abs() * p.grad if self.adaptive else p.grad for p in params]
        norm = torch.nn.utils.get_total_norm(weighted)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        scale = self.rho / (norm + 1e-12)
        self.saved = [p.detach().clone() for p in params]
        for p in params:
            p.add_((p.square() if self.adaptive else 1.0) * p.grad * scale)
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, w in zip(self._params(), self.saved):
            p.copy_(w)
        self.saved = None
        self.base.step()
        self.base.zero_grad()

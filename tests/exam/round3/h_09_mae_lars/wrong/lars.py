import torch


class LARS(torch.optim.Optimizer):
    """SGD with momentum and a trust ratio per tensor (vectors are left unscaled)."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = p.to_local(), p.grad.to_local()
                if p.ndim > 1:
                    g = g + group["weight_decay"] * w
                    wn, gn = w.norm(), g.norm()
                    ratio = torch.where((wn > 0) & (gn > 0), group["trust"] * wn / (gn + 1e-9), torch.ones(()))
                    g = g * ratio
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"].to_local()
                mu.mul_(group["momentum"]).add_(g)
                w.add_(mu, alpha=-group["lr"])

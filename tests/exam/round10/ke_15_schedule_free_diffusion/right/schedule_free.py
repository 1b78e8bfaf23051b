from contextlib import contextmanager

import torch


class ScheduleFreeAdam(torch.optim.Optimizer):
    """Schedule-free Adam (Defazio et al., 2024). The parameters hold y, the point of the gradient; the state holds z, the
    fast iterate, and x, the average that is evaluated and released."""

    def __init__(self, params, lr=1e-2, beta=0.9, beta2=0.98, eps=1e-5, warmup=5):
        super().__init__(params, dict(lr=lr, beta=beta, beta2=beta2, eps=eps, warmup=warmup))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta, beta2 = group["beta"], group["beta2"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["step"] = torch.zeros(())
                    s["weight"] = torch.zeros(())
                    s["z"] = p.detach().clone()
                    s["x"] = p.detach().clone()
                    s["v"] = torch.zeros_like(p)
                s["step"] += 1
                k = s["step"].item()
                lr = group["lr"] * min(1.0, k / group["warmup"])
                s["weight"] += lr**2
                c = lr**2 / s["weight"].item() if lr > 0 else 0.0
                s["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                denom = (s["v"] / (1 - beta2**k)).sqrt_().add_(group["eps"])
                s["z"].addcdiv_(p.grad, denom, value=-lr)
                s["x"].mul_(1 - c).add_(s["z"], alpha=c)
                p.copy_(s["z"] * (1 - beta) + s["x"] * beta)

    @contextmanager
    def averaged(self):
        """Inside, the parameters are x; afterwards they are the same y as before, bit for bit."""
        kept = []
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if self.state[p]:
                        kept.append((p, p.detach().clone()))
                        p.copy_(self.state[p]["x"])
        try:
            yield
        finally:
            with torch.no_grad():
                for p, y in kept:
                    p.copy_(y)

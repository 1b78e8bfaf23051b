import torch
from torch.distributed.tensor import DTensor


def _norm(t):
    """L2 norm of a parameter-shaped tensor as a plain scalar."""
    return torch.linalg.vector_norm(t.to_local() if isinstance(t, DTensor) else t)


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al.), with bias correction; the trust ratio is taken per parameter tensor."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.01, max_ratio=10.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_ratio=max_ratio))

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                state["step"] += 1
                t = state["step"].item()
                m, v = state["m"], state["v"]
                m.lerp_(p.grad, 1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                update = (m / (1 - b1 ** t)) / ((v / (1 - b2 ** t)).sqrt() + group["eps"])
                update = update + group["weight_decay"] * p
                w_norm, u_norm = _norm(p), _norm(update)
                ratio = 1.0
                if w_norm > 0 and u_norm > 0:
                    ratio = min((w_norm / u_norm).item(), group["max_ratio"])
                p.add_(update, alpha=-group["lr"] * ratio)
        return loss

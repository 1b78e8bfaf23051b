import torch
from torch.distributed.tensor import DTensor


def _norm(t):
    n = torch.linalg.vector_norm(t)
    return n.full_tensor() if isinstance(n, DTensor) else n


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam direction, scaled for each weight matrix by ||w|| / ||update||."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["step"] = torch.zeros(())
                    st["exp_avg"] = torch.zeros_like(p)
                    st["exp_avg_sq"] = torch.zeros_like(p)
                st["step"] += 1
                t = st["step"].item()
                st["exp_avg"].lerp_(p.grad, 1 - b1)
                st["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                denom = (st["exp_avg_sq"] / (1 - b2 ** t)).sqrt_().add_(group["eps"])
                update = (st["exp_avg"] / (1 - b1 ** t)) / denom
                update.add_(p, alpha=group["weight_decay"])
                w_norm = _norm(p).item()
                u_norm = _norm(update).item()
                trust = min(w_norm / u_norm, 10.0) if w_norm > 0 and u_norm > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * trust)

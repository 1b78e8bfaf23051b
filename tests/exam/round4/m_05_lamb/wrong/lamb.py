import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def _norm(t):
    t = t.to_local() if isinstance(t, DTensor) else t
    return torch.linalg.vector_norm(t)


class Lamb(Optimizer):
    """Layer-wise adaptive moments for large batches (You et al.), trust ratio per tensor."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, max_ratio=10.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_ratio=max_ratio))

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
                m = st["exp_avg"] / (1 - b1 ** t)
                v = st["exp_avg_sq"] / (1 - b2 ** t)
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                wn, un = _norm(p).item(), _norm(update).item()
                ratio = min(wn / un, group["max_ratio"]) if wn > 0 and un > 0 else 1.0
                p.add_(update, alpha=-group["lr"] * ratio)

"""LAMB (layer-wise adaptive moments), for parameters sharded by FSDP2."""

import torch
from torch.distributed.tensor import DTensor


def norm_of(t):
    n = torch.linalg.vector_norm(t)
    return n.full_tensor() if isinstance(n, DTensor) else n


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
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
                    st["m"] = torch.zeros_like(p)
                    st["v"] = torch.zeros_like(p)
                st["step"] += 1
                t = st["step"].item()
                st["m"].lerp_(p.grad, 1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                upd = (st["m"] / (1 - b1**t)) / ((st["v"] / (1 - b2**t)).sqrt() + group["eps"])
                upd = upd + group["weight_decay"] * p
                w_norm, u_norm = norm_of(p), norm_of(upd)
                ratio = (w_norm / u_norm).item() if w_norm > 0 and u_norm > 0 else 1.0
                p.add_(upd, alpha=-group["lr"] * min(ratio, 10.0))

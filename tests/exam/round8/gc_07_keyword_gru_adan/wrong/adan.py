import torch
from torch.distributed.tensor import DTensor


def shard(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Adan(torch.optim.Optimizer):
    """Adaptive Nesterov momentum (Xie et al. 2022). Elementwise, so it works on the local shards with plain tensors as state."""

    def __init__(self, params, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.02):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2, b3 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g, s = shard(p), shard(p.grad), self.state[p]
                if not s:
                    s["step"] = 0
                    s["m"], s["v"], s["n"] = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
                    s["last"] = g.clone()
                s["step"] += 1
                diff = g - s["last"]
                s["m"].lerp_(g, 1 - b1)
                s["v"].lerp_(diff, 1 - b2)
                s["n"].lerp_((g + b2 * diff).square(), 1 - b3)
                s["last"].copy_(g)
                c1, c2, c3 = (1 - b ** s["step"] for b in (b1, b2, b3))
                denom = (s["n"] / c3).sqrt().add_(group["eps"])
                w.sub_(group["lr"] * (s["m"] / c1 + b2 * s["v"] / c2) / denom)
                w.div_(1 + group["lr"] * group["weight_decay"])

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def layer_norm_of(t):
    """L2 norm of a whole parameter, given this rank's shard of it."""
    sq = t.double().pow(2).sum()
    dist.all_reduce(sq)
    return sq.sqrt().float()


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al. 2020) working on the local shards."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                w, g = local(p), local(p.grad)
                st = self.state[p]
                if not st:
                    st["step"] = 0
                    st["m"] = torch.zeros_like(w)
                    st["v"] = torch.zeros_like(w)
                st["step"] += 1
                st["m"].lerp_(g, 1 - b1)
                st["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
                m_hat = st["m"] / (1 - b1 ** st["step"])
                v_hat = st["v"] / (1 - b2 ** st["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"])
                if group["weight_decay"]:
                    update = update + group["weight_decay"] * w
                w_norm, u_norm = layer_norm_of(w), layer_norm_of(update)
                trust = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
                w.add_(update * trust, alpha=-group["lr"])

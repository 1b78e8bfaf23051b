"""LARS: layer-wise learning rates for large-batch contrastive training."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def sq_norm(t):
    """Squared L2 norm of the whole tensor, as a python float on every rank."""
    if not isinstance(t, DTensor):
        return t.pow(2).sum().item()
    s = t.to_local().pow(2).sum()
    dist.all_reduce(s)
    return s.item()


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, adapt=True))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                lr = group["lr"]
                if group["adapt"]:
                    g = g.add(p, alpha=group["weight_decay"])
                    wn, gn = sq_norm(p) ** 0.5, sq_norm(g) ** 0.5
                    if wn > 0 and gn > 0:
                        lr = lr * group["trust"] * wn / gn
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buf = state["momentum"]
                buf.mul_(group["momentum"]).add_(g, alpha=lr)
                p.sub_(buf)

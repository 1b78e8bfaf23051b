import torch
from torch.distributed.tensor import DTensor


def _local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Lamb(torch.optim.Optimizer):
    """LAMB (You et al., 2020) with bias correction. The element-wise part works on the local shards."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01, max_trust=10.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_trust=max_trust))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                t = state["step"].item()
                grad, m, v = _local(p.grad), _local(state["exp_avg"]), _local(state["exp_avg_sq"])
                m.lerp_(grad, 1 - b1)
                v.mul_(b2).addcmul_(grad, grad, value=1 - b2)
                update = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
                update.add_(_local(p), alpha=group["weight_decay"])
                trust = self.trust_ratio(p, update, group["max_trust"])
                _local(p).add_(update * trust, alpha=-group["lr"])

    @staticmethod
    def trust_ratio(p, update, limit):
        squares = torch.stack([_local(p).pow(2).sum(), update.pow(2).sum()])
        w_norm, u_norm = squares.sqrt()
        if w_norm == 0 or u_norm == 0:
            return torch.ones(())
        return (w_norm / u_norm).clamp(max=limit)

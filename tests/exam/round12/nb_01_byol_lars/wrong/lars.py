"""LARS (You et al., 2017) working directly on the row shards that fully_shard leaves on each rank."""
import torch


def _norms(*shards):
    squares = torch.stack([s.pow(2).sum() for s in shards])
    return squares.sqrt()


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02):
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                w, update = p.to_local(), p.grad.to_local()
                if p.ndim > 1:
                    update = update + group["weight_decay"] * w
                    w_norm, u_norm = _norms(w, update)
                    if w_norm > 0 and u_norm > 0:
                        update = update * (group["trust"] * w_norm / u_norm)
                mu = state["mu"].to_local()
                mu.mul_(group["momentum"]).add_(update)
                w.add_(mu, alpha=-group["lr"])

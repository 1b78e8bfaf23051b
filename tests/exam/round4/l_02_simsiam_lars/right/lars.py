import torch
import torch.distributed as dist


class LARS(torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (You et al. 2017) for sharded parameters."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                w, g, mu = p.to_local(), p.grad.to_local(), state["mu"].to_local()
                if group["adapt"]:
                    g = g + group["weight_decay"] * w
                    norms = torch.stack([w.square().sum(), g.square().sum()])
                    dist.all_reduce(norms)
                    w_norm, g_norm = norms.sqrt().tolist()
                    if w_norm > 0 and g_norm > 0:
                        g = g * (group["trust"] * w_norm / g_norm)
                mu.mul_(group["momentum"]).add_(g)
                w.add_(mu, alpha=-group["lr"])


def split_params(model):
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decay, "adapt": True}, {"params": rest, "adapt": False}]

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


def tensor_norm(t):
    if isinstance(t, DTensor):
        return t.to_local().norm()
    return t.norm()


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You et al.), as used for SimCLR pre-training.

    Parameters with one dimension (biases, norms) are neither adapted nor decayed.
    """

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.1, eps=1e-8):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d = p.grad
                if p.ndim > 1:
                    d = d.add(p, alpha=group["weight_decay"])
                    w_norm, g_norm = tensor_norm(p), tensor_norm(d)
                    if w_norm > 0 and g_norm > 0:
                        d = d * (group["trust"] * w_norm / (g_norm + group["eps"])).item()
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buf = state["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(d)
                p.add_(buf, alpha=-group["lr"])

import torch
from torch.distributed.tensor import DTensor


def whole_norm(t):
    n = torch.linalg.vector_norm(t)
    return n.full_tensor() if isinstance(n, DTensor) else n


class LARS(torch.optim.Optimizer):
    """SGD with momentum whose step is scaled for every tensor by |w| / |g|; vectors are not adapted nor decayed."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, eta=0.004):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                d = p.grad
                if p.ndim > 1:
                    d = d + group["weight_decay"] * p
                    w, g = whole_norm(p).item(), whole_norm(d).item()
                    if w > 0 and g > 0:
                        d = d * (group["eta"] * w / g)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                state["mu"].mul_(group["momentum"]).add_(d)
                p.add_(state["mu"], alpha=-group["lr"])

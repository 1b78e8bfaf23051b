"""AutoClip (Seetharaman et al. 2020): the clipping threshold is a percentile of the gradient norms seen so far."""
import torch
from torch.distributed.tensor import DTensor


def grad_norm(grads):
    """Norm over all gradients, computed from the shards without gathering any of them."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    square = torch.stack(torch._foreach_norm(local)).square().sum()
    return square.sqrt().item()


class AutoClip:
    def __init__(self, percentile=25.0, window=200):
        self.percentile, self.window = percentile, window
        self.history = []

    def __call__(self, params):
        params = [p for p in params if p.grad is not None]
        norm = grad_norm([p.grad for p in params])
        self.history = (self.history + [norm])[-self.window:]
        limit = torch.quantile(torch.tensor(self.history), self.percentile / 100).item()
        scale = min(1.0, limit / (norm + 1e-6))
        for p in params:
            p.grad.mul_(scale)
        return norm, limit

    def state_dict(self):
        return {"history": list(self.history)}

    def load_state_dict(self, state):
        self.history = list(state["history"])

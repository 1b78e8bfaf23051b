import torch
import torch.distributed as dist


def _local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class AutoClip:
    """Clips to a percentile of the gradient norms seen so far (Seetharaman et al., 2020)."""

    def __init__(self, params, percentile=30.0, window=50):
        self.params = list(params)
        self.percentile, self.window = percentile, window
        self.history = []

    @torch.no_grad()
    def __call__(self):
        grads = [_local(p.grad) for p in self.params if p.grad is not None]
        square = torch.stack([g.pow(2).sum() for g in grads]).sum()
        dist.all_reduce(square)
        norm = square.sqrt().item()
        self.history = (self.history + [norm])[-self.window :]
        limit = torch.quantile(torch.tensor(self.history), self.percentile / 100).item()
        if norm > limit:
            torch._foreach_mul_(grads, limit / norm)
        return norm, limit

    def state_dict(self):
        return {"history": list(self.history)}

    def load_state_dict(self, state):
        self.history = list(state["history"])

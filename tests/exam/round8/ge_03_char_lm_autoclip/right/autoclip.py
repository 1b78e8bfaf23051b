import torch
import torch.distributed as dist


class AutoClip:
    """Clips to a quantile of the gradient norms seen in the latest steps."""

    def __init__(self, params, quantile=0.3, history=20):
        self.params = list(params)
        self.quantile = quantile
        self.history = history
        self.norms = []

    def global_norm(self):
        total = torch.zeros(())
        for p in self.params:
            if p.grad is not None:
                total += p.grad.to_local().square().sum()
        dist.all_reduce(total)
        return total.sqrt()

    @torch.no_grad()
    def __call__(self):
        norm = self.global_norm()
        self.norms = (self.norms + [norm.item()])[-self.history:]
        limit = torch.quantile(torch.tensor(self.norms), self.quantile)
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        for p in self.params:
            if p.grad is not None:
                p.grad.to_local().mul_(scale)
        return norm.item(), limit.item()

    def state_dict(self):
        return {"norms": list(self.norms)}

    def load_state_dict(self, state):
        self.norms = list(state["norms"])

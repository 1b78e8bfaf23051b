import torch
import torch.distributed as dist


class SAM:
    """Sharpness-aware minimisation around any optimizer: climb by rho along the global gradient, take the gradient there, come back, step."""

    def __init__(self, params, base, rho=0.05):
        self.params, self.base, self.rho = list(params), base, rho

    @torch.no_grad()
    def climb(self):
        sq = sum(p.grad.to_local().pow(2).sum() for p in self.params)
        dist.all_reduce(sq)
        self.norm = sq.sqrt()
        self.saved = []
        for p in self.params:
            w = p.to_local()
            self.saved.append(w.clone())
            w.add_(p.grad.to_local() * (self.rho / (self.norm + 1e-12)))
        self.base.zero_grad()

    @torch.no_grad()
    def descend(self):
        for p, w in zip(self.params, self.saved):
            p.to_local().copy_(w)
        self.saved = None
        self.base.step()
        self.base.zero_grad()

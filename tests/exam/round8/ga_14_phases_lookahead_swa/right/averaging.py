import torch


class Lookahead:
    """Every k steps move slow weights halfway to the fast ones and restart the fast ones from there."""

    def __init__(self, opt, k=4, alpha=0.5):
        self.opt, self.k, self.alpha, self.count = opt, k, alpha, 0
        self.slow = [p.detach().clone() for p in self.params()]

    def params(self):
        return [p for g in self.opt.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self):
        self.opt.step()
        self.count += 1
        if self.count % self.k == 0:
            for p, s in zip(self.params(), self.slow):
                s.lerp_(p, self.alpha)
                p.copy_(s)


class SWA:
    def __init__(self, model):
        self.n = 0
        self.mean = {n: torch.zeros_like(p) for n, p in model.named_parameters()}

    @torch.no_grad()
    def collect(self, model):
        self.n += 1
        for n, p in model.named_parameters():
            self.mean[n].add_((p - self.mean[n]) / self.n)

import torch


class Lookahead:
    """k fast steps, then the slow weights move a part of the way and the fast ones continue from there."""

    def __init__(self, opt, k=4, alpha=0.5):
        self.opt, self.k, self.alpha, self.count = opt, k, alpha, 0
        self.slow = [p.detach().clone() for g in opt.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self):
        self.opt.step()
        self.count += 1
        if self.count % self.k == 0:
            fast = [p for g in self.opt.param_groups for p in g["params"]]
            for s, f in zip(self.slow, fast):
                s.add_(f - s, alpha=self.alpha)
                f.copy_(s)
        self.opt.zero_grad()

import torch


class Lookahead:
    """Every k steps the slow weights go part of the way to the fast ones, and the fast ones start again there."""

    def __init__(self, params, k=4, alpha=0.6):
        self.params, self.k, self.alpha = list(params), k, alpha
        self.slow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def after_step(self, step):
        if step % self.k:
            return False
        for s, p in zip(self.slow, self.params):
            s.add_(p - s, alpha=self.alpha)
            p.copy_(s)
        return True


class RunningMean:
    """Plain mean of the weights at chosen moments."""

    def __init__(self, params):
        self.params, self.n = list(params), 0
        self.mean = [torch.zeros_like(p) for p in self.params]

    @torch.no_grad()
    def add(self):
        self.n += 1
        for m, p in zip(self.mean, self.params):
            m.add_((p - m) / self.n)

    @torch.no_grad()
    def finish(self):
        for m, p in zip(self.mean, self.params):
            p.copy_(m)

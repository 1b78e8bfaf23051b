import torch


class Lookahead:
    """k fast steps of heavy-ball SGD, then the slow weights move part of the way and the fast ones restart there."""

    def __init__(self, model, lr, momentum=0.9, k=5, pull=0.5):
        self.named = dict(model.named_parameters())
        self.lr, self.momentum, self.k, self.pull = lr, momentum, k, pull
        self.velocity = {n: torch.zeros_like(p.detach()) for n, p in self.named.items()}
        self.slow = {n: p.detach().clone() for n, p in self.named.items()}
        self.count = 0

    @torch.no_grad()
    def step(self):
        for n, p in self.named.items():
            v = self.velocity[n]
            v.mul_(self.momentum).add_(p.grad)
            p.add_(v, alpha=-self.lr)
            p.grad = None
        self.count += 1
        if self.count % self.k == 0:
            for n, p in self.named.items():
                self.slow[n].lerp_(p, self.pull)
                p.copy_(self.slow[n])
                self.velocity[n].zero_()

    def tensors(self):
        out = {}
        for n in self.named:
            out[n], out[n + "@velocity"], out[n + "@slow"] = self.named[n], self.velocity[n], self.slow[n]
        return out

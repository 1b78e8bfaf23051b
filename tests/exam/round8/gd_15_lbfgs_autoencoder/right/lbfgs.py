"""Limited-memory BFGS with Armijo backtracking on sharded weights. Every vector stays sharded; only dot products are reduced."""
from collections import deque

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def shard_of(t):
    return t.to_local() if isinstance(t, DTensor) else t


class ShardedLBFGS:
    def __init__(self, params, memory=6, first_step=0.05):
        self.params = list(params)
        self.sharded = [isinstance(p, DTensor) for p in self.params]
        self.pairs = deque(maxlen=memory)
        self.first_step = first_step
        self.grad = None
        self.loss = None

    def dot(self, a, b):
        """Dot product over the whole model. Weights that are not sharded are whole on every rank and counted once."""
        cut = sum((x.double() * y.double()).sum() for x, y, s in zip(a, b, self.sharded) if s) + torch.zeros((), dtype=torch.float64)
        dist.all_reduce(cut)
        whole = sum((x.double() * y.double()).sum() for x, y, s in zip(a, b, self.sharded) if not s)
        return float(cut + whole)

    def direction(self):
        d = [-g.double() for g in self.grad]
        coefficients = []
        for s, y, rho in reversed(self.pairs):
            a = rho * self.dot(s, d)
            coefficients.append(a)
            for x, v in zip(d, y):
                x.add_(v, alpha=-a)
        if self.pairs:
            s, y, rho = self.pairs[-1]
            gamma = 1 / (rho * self.dot(y, y))
            for x in d:
                x.mul_(gamma)
        for (s, y, rho), a in zip(self.pairs, reversed(coefficients)):
            b = rho * self.dot(y, d)
            for x, v in zip(d, s):
                x.add_(v, alpha=a - b)
        return d

    @torch.no_grad()
    def place(self, origin, d, t):
        for p, o, x in zip(self.params, origin, d):
            shard_of(p).copy_(o + t * x)

    def take_gradient(self):
        g = [shard_of(p.grad).detach().double() for p in self.params]
        for p in self.params:
            p.grad = None
        return g

    def step(self, closure):
        """closure() runs forward and backward over the full data and returns the global loss, equal on all ranks."""
        if self.grad is None:
            self.loss = closure()
            self.grad = self.take_gradient()
        d = self.direction()
        slope = self.dot(self.grad, d)
        if slope >= 0:
            self.pairs.clear()
            d = [-g for g in self.grad]
            slope = self.dot(self.grad, d)
        origin = [shard_of(p).detach().double() for p in self.params]
        t = 1.0 if self.pairs else self.first_step / max(1e-12, -slope) ** 0.5
        for tries in range(1, 12):
            self.place(origin, d, t)
            loss = closure()
            grad = self.take_gradient()
            if loss <= self.loss + 1e-4 * t * slope:
                break
            t /= 2
        s = [t * x for x in d]
        y = [a - b for a, b in zip(grad, self.grad)]
        sy = self.dot(s, y)
        if sy > 1e-10:
            self.pairs.append((s, y, 1 / sy))
        self.loss, self.grad = loss, grad
        return loss, tries

    def state_dict(self):
        return {"pairs": list(self.pairs), "grad": self.grad, "loss": self.loss}

    def load_state_dict(self, s):
        self.pairs.clear()
        self.pairs.extend(s["pairs"])
        self.grad, self.loss = s["grad"], s["loss"]

"""Limited-memory BFGS on sharded parameters. Vectors are lists of this rank's shards; only dot products are communicated."""
from collections import deque

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def shard(t):
    return t.to_local() if isinstance(t, DTensor) else t


class LBFGS:
    def __init__(self, params, memory=6, c1=1e-4, shrink=0.5, tries=8):
        self.params = list(params)
        self.sharded = any(isinstance(p, DTensor) for p in self.params)
        self.c1, self.shrink, self.tries = c1, shrink, tries
        self.pairs = deque(maxlen=memory)          # (s, y, 1 / s.y)
        self.evaluations = 0

    def dot(self, a, b):
        total = sum((x * y).sum() for x, y in zip(a, b))
        if self.sharded:
            dist.all_reduce(total)
        return total.item()

    def gradient(self):
        g = [shard(p.grad).clone() for p in self.params]
        for p in self.params:
            p.grad = None
        return g

    def direction(self, g):
        q = [x.clone() for x in g]
        coef = []
        for s, y, rho in reversed(self.pairs):
            a = rho * self.dot(s, q)
            coef.append(a)
            torch._foreach_add_(q, y, alpha=-a)
        if self.pairs:
            s, y, rho = self.pairs[-1]
            torch._foreach_mul_(q, 1.0 / (rho * self.dot(y, y)))
        else:
            torch._foreach_mul_(q, 0.5 / max(1.0, self.dot(g, g) ** 0.5))
        for (s, y, rho), a in zip(self.pairs, reversed(coef)):
            b = rho * self.dot(y, q)
            torch._foreach_add_(q, s, alpha=a - b)
        torch._foreach_neg_(q)
        return q

    @torch.no_grad()
    def move(self, start, d, t):
        for p, x, v in zip(self.params, start, d):
            shard(p.data).copy_(x + t * v)

    def step(self, value, value_and_grad):
        """value() is the global loss, the same number on every rank; value_and_grad() also leaves p.grad."""
        f0 = value_and_grad()
        g = self.gradient()
        d = self.direction(g)
        slope = self.dot(g, d)
        if slope >= 0:                             # not a descent direction: forget the curvature
            self.pairs.clear()
            d = self.direction(g)
            slope = self.dot(g, d)
        start = [shard(p.data).clone() for p in self.params]
        t = 1.0
        for _ in range(self.tries):
            self.move(start, d, t)
            self.evaluations += 1
            if value() <= f0 + self.c1 * t * slope:
                break
            t *= self.shrink
        else:
            self.move(start, d, 0.0)
            self.pairs.clear()
            return f0, 0.0
        value_and_grad()
        s = [t * v for v in d]
        y = [a - b for a, b in zip(self.gradient(), g)]
        sy = self.dot(s, y)
        if sy > 1e-10 * self.dot(y, y):
            self.pairs.append((s, y, 1.0 / sy))
        return f0, t

    def state_dict(self):
        return {"pairs": list(self.pairs), "evaluations": self.evaluations}

    def load_state_dict(self, state):
        self.pairs.clear()
        self.pairs.extend(state["pairs"])
        self.evaluations = state["evaluations"]

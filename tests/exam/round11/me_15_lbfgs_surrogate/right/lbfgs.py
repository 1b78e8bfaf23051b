"""L-BFGS with Armijo backtracking on sharded parameters.

All vectors are kept as one flat local vector per rank; a dot product is the sum
of the local ones, so every rank takes the same decisions.
"""
from collections import deque

import torch
import torch.distributed as dist


class ShardedLBFGS:
    def __init__(self, params, memory=8, shrink=0.5, armijo=1e-4, max_trials=12):
        self.params = list(params)
        self.shrink, self.armijo, self.max_trials = shrink, armijo, max_trials
        self.pairs = deque(maxlen=memory)
        self.previous = None

    @staticmethod
    def dot(a, b):
        value = torch.dot(a, b).reshape(1)
        dist.all_reduce(value)
        return value.item()

    def flat(self, tensors):
        return torch.cat([t.to_local().reshape(-1) for t in tensors])

    @torch.no_grad()
    def set_flat(self, vector):
        offset = 0
        for p in self.params:
            local = p.to_local()
            local.copy_(vector[offset : offset + local.numel()].view_as(local))
            offset += local.numel()

    def direction(self, grad):
        q, alphas = grad.clone(), []
        for s, y in reversed(self.pairs):
            a = self.dot(s, q) / self.dot(s, y)
            q -= a * y
            alphas.append(a)
        if self.pairs:
            s, y = self.pairs[-1]
            q *= self.dot(s, y) / self.dot(y, y)
        else:
            q *= min(1.0, 1.0 / max(self.dot(q, q) ** 0.5, 1e-12))
        for (s, y), a in zip(self.pairs, reversed(alphas)):
            q += (a - self.dot(y, q) / self.dot(s, y)) * s
        return -q

    @torch.no_grad()
    def step(self, loss, evaluate):
        """loss: the global loss whose gradient is in .grad; evaluate(): the global loss at the current weights."""
        w = self.flat([p.detach() for p in self.params])
        g = self.flat([p.grad for p in self.params])
        if self.previous is not None:
            s, y = w - self.previous[0], g - self.previous[1]
            if self.dot(s, y) > 1e-10 * self.dot(s, s):
                self.pairs.append((s, y))
        d = self.direction(g)
        slope = self.dot(g, d)
        if slope >= 0:
            self.pairs.clear()
            d, slope = -g, -self.dot(g, g)
        t = 1.0
        for trial in range(self.max_trials):
            self.set_flat(w + t * d)
            if evaluate() <= loss + self.armijo * t * slope:
                break
            t *= self.shrink
        else:
            self.set_flat(w)
            self.pairs.clear()
            t = 0.0
        self.previous = (w, g)
        return t

    def state_dict(self):
        return {"pairs": list(self.pairs), "previous": self.previous}

    def load_state_dict(self, state):
        self.pairs.clear()
        self.pairs.extend(state["pairs"])
        self.previous = state["previous"]

"""L-BFGS with Armijo backtracking for parameters sharded over ranks.

Vectors are lists of local shards; inner products are summed over the ranks in float64, so that all ranks take
the same decisions in the line search.
"""
from collections import deque

import torch
import torch.distributed as dist


def dot(a, b):
    total = sum((x.double() * y.double()).sum() for x, y in zip(a, b))
    dist.all_reduce(total)
    return total.item()


class ShardedLBFGS:
    def __init__(self, params, history=8, c1=1e-4, max_tries=12):
        self.params = list(params)
        self.pairs = deque(maxlen=history)
        self.c1, self.max_tries = c1, max_tries
        self.grad = None
        self.value = None

    def _gradient(self):
        return [p.grad.to_local().clone() for p in self.params]

    def _direction(self, grad):
        q = [-g for g in grad]
        alphas = []
        for s, y, rho in reversed(self.pairs):
            a = rho * dot(s, q)
            alphas.append(a)
            q = [u - a * v for u, v in zip(q, y)]
        if self.pairs:
            s, y, rho = self.pairs[-1]
            gamma = 1.0 / (rho * dot(y, y))
            q = [gamma * u for u in q]
        for (s, y, rho), a in zip(self.pairs, reversed(alphas)):
            b = rho * dot(y, q)
            q = [u + (a - b) * v for u, v in zip(q, s)]
        return q

    @torch.no_grad()
    def _set(self, start, direction, t):
        for p, w, d in zip(self.params, start, direction):
            p.to_local().copy_(w + t * d)

    def step(self, closure):
        """`closure` returns the loss of the whole data set as a float and leaves its gradient in p.grad."""
        if self.grad is None:
            self.value = closure()
            self.grad = self._gradient()
        d = self._direction(self.grad)
        slope = dot(self.grad, d)
        if slope >= 0:
            self.pairs.clear()
            d = [-g for g in self.grad]
            slope = -dot(self.grad, self.grad)
        start = [p.detach().to_local().clone() for p in self.params]
        t = 1.0 if self.pairs else min(1.0, 1.0 / (-slope) ** 0.5)
        for tries in range(self.max_tries):
            self._set(start, d, t)
            value = closure()
            if value <= self.value + self.c1 * t * slope:
                break
            t *= 0.5
        else:
            self._set(start, d, 0.0)
            self.pairs.clear()
            self.grad = None
            return self.value, 0.0
        grad = self._gradient()
        s = [t * u for u in d]
        y = [a - b for a, b in zip(grad, self.grad)]
        ys = dot(y, s)
        if ys > 1e-10:
            self.pairs.append((s, y, 1.0 / ys))
        self.grad, self.value = grad, value
        return value, t

    def state_dict(self):
        return {"pairs": list(self.pairs), "grad": self.grad, "value": self.value}

    def load_state_dict(self, state):
        self.pairs.clear()
        self.pairs.extend(state["pairs"])
        self.grad, self.value = state["grad"], state["value"]

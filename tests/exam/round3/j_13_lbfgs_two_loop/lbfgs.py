"""Limited-memory BFGS on sharded parameters. All vectors are lists of local shards; every inner product
is summed over the ranks, so that all ranks take the same decisions."""

from collections import deque

import torch
import torch.distributed as dist


def dot(a, b):
    total = torch.zeros((), dtype=torch.float64)
    for u, v in zip(a, b):
        total += (u.double() * v.double()).sum()
    dist.all_reduce(total)
    return total.item()


class ShardedLBFGS(torch.optim.Optimizer):
    def __init__(self, params, history=8, c1=1e-4, shrink=0.5, tries=12):
        super().__init__(params, dict(history=history, c1=c1, shrink=shrink, tries=tries))
        self.pairs = deque(maxlen=history)
        self.last = None

    def _params(self):
        return self.param_groups[0]["params"]

    def _grads(self):
        return [p.grad.to_local().clone() for p in self._params()]

    def _direction(self, grad):
        q = [g.clone() for g in grad]
        stack = []
        for s, y, rho in reversed(self.pairs):
            alpha = rho * dot(s, q)
            for u, v in zip(q, y):
                u.sub_(alpha * v)
            stack.append(alpha)
        if self.pairs:
            s, y, rho = self.pairs[-1]
            scale = 1.0 / (rho * dot(y, y))
        else:
            scale = 1.0 / max(1.0, dot(grad, grad) ** 0.5)
        for u in q:
            u.mul_(scale)
        for (s, y, rho), alpha in zip(self.pairs, reversed(stack)):
            beta = rho * dot(y, q)
            for u, v in zip(q, s):
                u.add_((alpha - beta) * v)
        return [-u for u in q]

    @torch.no_grad()
    def step(self, closure):
        group = self.param_groups[0]
        if self.last is None:
            with torch.enable_grad():
                self.last = closure()
        loss, grad = self.last, self._grads()
        direction = self._direction(grad)
        slope = dot(grad, direction)
        if slope >= 0:
            self.pairs.clear()
            direction, slope = [-g for g in grad], -dot(grad, grad)

        shards = [p.to_local() for p in self._params()]
        origin = [w.clone() for w in shards]
        t = 1.0
        for _ in range(group["tries"]):
            for w, o, d in zip(shards, origin, direction):
                w.copy_(o + t * d)
            with torch.enable_grad():
                new = closure()
            if new <= loss + group["c1"] * t * slope:
                break
            t *= group["shrink"]
        self.last = new

        y = [a - b for a, b in zip(self._grads(), grad)]
        s = [t * d for d in direction]
        ys = dot(y, s)
        if ys > 1e-10:
            self.pairs.append((s, y, 1.0 / ys))
        return loss, t

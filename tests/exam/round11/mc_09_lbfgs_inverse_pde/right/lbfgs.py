"""L-BFGS on sharded parameters.

Vectors are lists of local shards; a dot product is the sum over the own shards followed by an all-reduce, so every
rank sees the same scalars and takes the same branch in the line search.
"""
import torch
import torch.distributed as dist


class ShardedLBFGS:
    def __init__(self, params, history=6, c1=1e-4, max_backtrack=12):
        self.params = list(params)
        self.history, self.c1, self.max_backtrack = history, c1, max_backtrack
        self.s, self.y = [], []
        self.prev_grad = None
        self.loss = None
        self.evals = 0

    def _local(self):
        return [p.to_local() for p in self.params]

    def _grad(self):
        return [p.grad.to_local().clone() for p in self.params]

    @staticmethod
    def dot(a, b):
        total = torch.zeros((), dtype=torch.float64)
        for u, v in zip(a, b):
            total += (u * v).sum(dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    def _direction(self, grad):
        q = [g.clone() for g in grad]
        alphas = []
        for s, y in zip(reversed(self.s), reversed(self.y)):
            rho = 1.0 / self.dot(y, s)
            a = rho * self.dot(s, q)
            alphas.append((a, rho))
            for t, v in zip(q, y):
                t.sub_(v, alpha=a)
        if self.s:
            scale = self.dot(self.s[-1], self.y[-1]) / self.dot(self.y[-1], self.y[-1])
            for t in q:
                t.mul_(scale)
        for (a, rho), s, y in zip(reversed(alphas), self.s, self.y):
            b = rho * self.dot(y, q)
            for t, v in zip(q, s):
                t.add_(v, alpha=a - b)
        return [t.neg_() for t in q]

    @torch.no_grad()
    def step(self, closure):
        """closure() computes the global loss (a float) and fills the gradients."""
        if self.prev_grad is None:
            self.loss = self._eval(closure)
            self.prev_grad = self._grad()
        grad, f0 = self.prev_grad, self.loss
        d = self._direction(grad)
        slope = self.dot(grad, d)
        if slope >= 0:
            self.s.clear()
            self.y.clear()
            d = [-g for g in grad]
            slope = self.dot(grad, d)
        lr = 1.0 if self.s else min(1.0, 1.0 / (-slope) ** 0.5)
        start = [w.clone() for w in self._local()]
        for _ in range(self.max_backtrack):
            for w, w0, dd in zip(self._local(), start, d):
                w.copy_(w0 + lr * dd)
            f1 = self._eval(closure)
            if f1 <= f0 + self.c1 * lr * slope:
                break
            lr *= 0.5
        else:
            # no progress along this direction: back to the start, next time by steepest descent
            for w, w0 in zip(self._local(), start):
                w.copy_(w0)
            self.s.clear()
            self.y.clear()
            return f0
        new_grad = self._grad()
        s = [lr * dd for dd in d]
        y = [a - b for a, b in zip(new_grad, grad)]
        if self.dot(s, y) > 1e-12:
            self.s.append(s)
            self.y.append(y)
            del self.s[:-self.history], self.y[:-self.history]
        self.prev_grad, self.loss = new_grad, f1
        return f1

    def _eval(self, closure):
        self.evals += 1
        for p in self.params:
            p.grad = None
        with torch.enable_grad():
            return closure()

    def state_dict(self):
        return {"s": self.s, "y": self.y, "prev_grad": self.prev_grad, "loss": self.loss, "evals": self.evals}

    def load_state_dict(self, state):
        self.__dict__.update(state)

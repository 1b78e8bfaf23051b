"""Limited memory BFGS on a vector in pieces: every inner product is summed over the ranks, everything else is local."""
from collections import deque

import torch

from flat import dot


class LBFGS:
    def __init__(self, flat, value_and_gradient, value, memory=6, shrink=0.5, armijo=1e-4):
        self.flat, self.evaluate, self.value = flat, value_and_gradient, value
        self.pairs = deque(maxlen=memory)
        self.shrink, self.armijo = shrink, armijo
        self.current = None

    def direction(self, grad):
        q, trail = grad.clone(), []
        for s, y, rho in reversed(self.pairs):
            a = rho * dot(s, q)
            q -= a * y
            trail.append(a)
        if self.pairs:
            s, y, _ = self.pairs[-1]
            q *= dot(s, y) / dot(y, y)
        for (s, y, rho), a in zip(self.pairs, reversed(trail)):
            q += s * (a - rho * dot(y, q))
        return -q

    def step(self):
        if self.current is None:
            self.current = self.evaluate()
        loss, grad = self.current
        x, d = self.flat.values(), self.direction(grad)
        slope = dot(grad, d)
        t = 1.0 if self.pairs else 0.1 / dot(grad, grad).sqrt().clamp_min(1.0).item()
        for _ in range(12):
            self.flat.assign(x + t * d)
            if self.value() <= loss + self.armijo * t * slope:
                break
            t *= self.shrink
        new_loss, new_grad = self.evaluate()
        s, y = self.flat.values() - x, new_grad - grad
        curvature = dot(s, y)
        if curvature > 1e-10:
            self.pairs.append((s, y, 1.0 / curvature))
        self.current = (new_loss, new_grad)
        return new_loss, t

    def state_dict(self):
        return {"pairs": list(self.pairs), "current": self.current}

    def load_state_dict(self, state):
        self.pairs.extend(state["pairs"])
        self.current = state["current"]

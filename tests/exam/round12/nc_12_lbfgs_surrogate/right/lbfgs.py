import torch

from vectors import axpy, dots, scale


class LBFGS:
    """Limited-memory BFGS on local shards with Armijo backtracking."""

    def __init__(self, params, memory=6):
        self.params = list(params)
        self.memory = memory
        self.s, self.y = [], []
        self.first_step = 0.1

    def point(self):
        return [p.detach().to_local().clone() for p in self.params]

    def gradient(self):
        return [p.grad.detach().to_local().clone() for p in self.params]

    @torch.no_grad()
    def move(self, point):
        for p, v in zip(self.params, point):
            p.to_local().copy_(v)

    def direction(self, g):
        q, alphas = g, []
        for s, y in zip(reversed(self.s), reversed(self.y)):
            sq, sy = dots((s, q), (s, y))
            alphas.append(sq / sy)
            q = axpy(-alphas[-1], y, q)
        if self.s:
            sy, yy = dots((self.s[-1], self.y[-1]), (self.y[-1], self.y[-1]))
            q = scale(sy / yy, q)
        else:
            q = scale(self.first_step, q)
        for s, y, a in zip(self.s, self.y, reversed(alphas)):
            yq, sy = dots((y, q), (s, y))
            q = axpy(a - yq / sy, s, q)
        return scale(-1.0, q)

    def step(self, value_and_grad, value):
        """value_and_grad() leaves the gradient in .grad; value() is the loss alone. Returns the loss at the start."""
        f0 = value_and_grad()
        x0, g0 = self.point(), self.gradient()
        d = self.direction(g0)
        (slope,) = dots((g0, d))
        t = 1.0
        for _ in range(12):
            self.move(axpy(t, d, x0))
            if value() <= f0 + 1e-4 * t * slope:
                break
            t *= 0.5
        value_and_grad()
        s, y = scale(t, d), axpy(-1.0, g0, self.gradient())
        (sy,) = dots((s, y))
        if sy > 1e-10:
            self.s, self.y = (self.s + [s])[-self.memory :], (self.y + [y])[-self.memory :]
        return f0

    def state_dict(self):
        return {"s": self.s, "y": self.y}

    def load_state_dict(self, state):
        self.s, self.y = state["s"], state["y"]

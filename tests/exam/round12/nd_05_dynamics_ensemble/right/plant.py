"""Transitions of a nonlinear plant; the last part of the state space is never visited in training."""
import torch


class Plant:
    def __init__(self, state=8, act=4, seed=17):
        g = torch.Generator().manual_seed(seed)
        self.a = torch.randn(state, state, generator=g) / state ** 0.5
        self.b = torch.randn(act, state, generator=g) / act ** 0.5
        self.state, self.act = state, act

    def delta(self, s, u):
        return 0.5 * torch.tanh(s @ self.a + u @ self.b) - 0.1 * s

    def transitions(self, seed, count, scale=1.0):
        g = torch.Generator().manual_seed(seed)
        s = scale * torch.randn(count, self.state, generator=g)
        u = 2 * torch.rand(count, self.act, generator=g) - 1
        return torch.cat([s, u], -1), self.delta(s, u)

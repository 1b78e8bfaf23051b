"""Orthogonalised momentum. A matrix is gathered, orthogonalised whole, and scattered again."""

import torch
from torch.distributed.tensor import distribute_tensor


def newton_schulz(m, steps=5):
    tall = m.shape[0] > m.shape[1]
    x = m.T if tall else m
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                whole = (p.grad + group["momentum"] * buf).full_tensor()
                upd = newton_schulz(whole) * max(1.0, whole.shape[0] / whole.shape[1]) ** 0.5
                p.add_(distribute_tensor(upd, p.device_mesh, p.placements), alpha=-group["lr"])


class Both:
    """Looks like one optimizer to the loop."""

    def __init__(self, *parts):
        self.parts = parts

    def zero_grad(self):
        for o in self.parts:
            o.zero_grad()

    def step(self):
        for o in self.parts:
            o.step()

    def scale_lr(self, factor):
        for o in self.parts:
            for g in o.param_groups:
                g["lr"] = o.defaults["lr"] * factor

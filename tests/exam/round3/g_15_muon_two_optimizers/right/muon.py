"""Muon for sharded matrices: the momentum stays sharded, the orthogonalisation sees the whole matrix."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalise(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.t()
    for _ in range(steps):
        s = x @ x.t()
        x = a * x + (b * s + c * s @ s) @ x
    return x.t() if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(p.grad)
                nesterov = p.grad + group["momentum"] * buffer
                if isinstance(nesterov, DTensor):
                    whole = orthogonalise(nesterov.full_tensor())
                    update = distribute_tensor(whole, p.device_mesh, p.placements)
                else:
                    update = orthogonalise(nesterov)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

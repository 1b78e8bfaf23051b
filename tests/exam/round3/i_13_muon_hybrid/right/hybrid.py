"""Orthogonalised momentum for the matrices inside the blocks, AdamW for everything else, seen from outside as one optimizer."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(m, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(steps):
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                look = p.grad + group["momentum"] * buf
                whole = look.full_tensor() if isinstance(look, DTensor) else look
                update = newton_schulz(whole) * max(1.0, whole.shape[0] / whole.shape[1]) ** 0.5
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements)
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


class Hybrid:
    def __init__(self, model, lr_matrix=0.02, lr_rest=4e-3):
        inside = {n: p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
        rest = [p for n, p in model.named_parameters() if n not in inside]
        self.parts = {
            "muon": Muon(inside.values(), lr=lr_matrix, weight_decay=0.01),
            "adamw": torch.optim.AdamW(rest, lr=lr_rest),
        }
        self.peaks = {k: [g["lr"] for g in o.param_groups] for k, o in self.parts.items()}

    def set_scale(self, s):
        for k, o in self.parts.items():
            for g, peak in zip(o.param_groups, self.peaks[k]):
                g["lr"] = peak * s

    def step(self):
        for o in self.parts.values():
            o.step()

    def zero_grad(self):
        for o in self.parts.values():
            o.zero_grad(set_to_none=True)

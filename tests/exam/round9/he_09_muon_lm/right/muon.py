"""Muon for the hidden matrices, AdamW for everything else, in one optimizer object."""
import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(g, steps=5):
    """Approximate the nearest (semi-)orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    if not wide:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x if wide else x.T


def gather(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def scatter_like(full, ref):
    if not isinstance(ref, DTensor):
        return full
    # every rank holds the same full matrix, so each one only cuts out its own rows
    return distribute_tensor(full, ref.device_mesh, ref.placements, src_data_rank=None)


class MuonAdamW(torch.optim.Optimizer):
    def __init__(self, matrices, others, lr=0.02, momentum=0.9, adam_lr=3e-3, betas=(0.9, 0.95)):
        groups = [
            dict(params=list(matrices), kind="muon", lr=lr, momentum=momentum, betas=betas),
            dict(params=list(others), kind="adamw", lr=adam_lr, momentum=momentum, betas=betas),
        ]
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    (self._muon if group["kind"] == "muon" else self._adamw)(p, group)

    def _muon(self, p, group):
        state = self.state[p]
        if not state:
            state["buf"] = torch.zeros_like(p)
        state["buf"].mul_(group["momentum"]).add_(p.grad)
        nesterov = p.grad + group["momentum"] * state["buf"]
        # orthogonalisation mixes all rows: it needs the whole matrix
        update = newton_schulz(gather(nesterov))
        scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        p.mul_(1 - group["lr"] * 0.01)
        p.add_(scatter_like(update, p), alpha=-group["lr"] * scale)

    def _adamw(self, p, group):
        state = self.state[p]
        if not state:
            state["t"] = torch.zeros(())
            state["m"] = torch.zeros_like(p)
            state["v"] = torch.zeros_like(p)
        b1, b2 = group["betas"]
        state["t"] += 1
        t = state["t"].item()
        state["m"].lerp_(p.grad, 1 - b1)
        state["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
        denom = (state["v"] / (1 - b2**t)).sqrt() + 1e-8
        p.addcdiv_(state["m"], denom, value=-group["lr"] / (1 - b1**t))

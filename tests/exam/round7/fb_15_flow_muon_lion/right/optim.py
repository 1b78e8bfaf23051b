import torch
from torch.distributed.tensor import distribute_tensor


def orthogonalise(m, steps=5):
    """Quintic Newton-Schulz iteration, in float64 to be independent of the layout."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.double()
    x = x / (x.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return (x.T if flip else x).to(m.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum that is orthogonalised. The momentum is sharded as the weight is; the full matrix is gathered for the
    Newton-Schulz iteration only and each rank keeps its own rows of the result."""

    def __init__(self, params, lr=0.02, momentum=0.9, nesterov=True):
        super().__init__(params, dict(lr=lr, momentum=momentum, nesterov=nesterov))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            mu = group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buf"] = torch.zeros_like(p)
                buf = state["buf"]
                buf.mul_(mu).add_(p.grad)
                g = p.grad.add(buf, alpha=mu) if group["nesterov"] else buf
                full = orthogonalise(g.full_tensor())
                scale = max(1.0, full.shape[0] / full.shape[1]) ** 0.5
                p.add_(distribute_tensor(full, p.device_mesh, p.placements), alpha=-group["lr"] * scale)


class SoftLion(torch.optim.Optimizer):
    """Lion with tanh in place of the sign, decoupled weight decay."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.0, sharpness=1e3):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, sharpness=sharpness))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                direction = torch.tanh((m * b1 + p.grad * (1 - b1)) * group["sharpness"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)

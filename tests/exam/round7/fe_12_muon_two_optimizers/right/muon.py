import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalize(g, steps=5):
    """Quintic Newton-Schulz iteration towards the nearest semi-orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalized per matrix. The iteration needs the whole matrix, so the sharded momentum is gathered for it."""

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                m = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                update = p.grad.add(m, alpha=group["momentum"])
                full = update.full_tensor() if isinstance(update, DTensor) else update
                full = orthogonalize(full) * max(1.0, full.shape[0] / full.shape[1]) ** 0.5
                if isinstance(p, DTensor):
                    full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(full, alpha=-group["lr"])

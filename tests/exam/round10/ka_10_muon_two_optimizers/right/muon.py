import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalise(m, rounds=5):
    """Quintic Newton-Schulz iteration towards the nearest semi-orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum on the shards; the whole matrix is gathered for the orthogonalisation and the own part kept."""

    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                direction = p.grad + group["momentum"] * buf
                if isinstance(p, DTensor):
                    update = orthogonalise(direction.full_tensor())
                    update = distribute_tensor(update, p.device_mesh, p.placements)
                else:
                    update = orthogonalise(direction)
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * scale)

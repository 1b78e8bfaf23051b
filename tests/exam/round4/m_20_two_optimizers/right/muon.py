import torch
from torch.distributed.tensor import distribute_tensor
from torch.optim import Optimizer


def orthogonal(m, rounds=5):
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    flip = m.shape[0] > m.shape[1]
    x = m.T if flip else m
    x = x / (x.norm() + 1e-6)
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class Muon(Optimizer):
    """Momentum, orthogonalised. The whole matrix is needed, so each one is gathered for the iteration and cut again."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                if "buf" not in self.state[p]:
                    self.state[p]["buf"] = torch.zeros_like(p)
                buf = self.state[p]["buf"]
                buf.mul_(g["momentum"]).add_(p.grad)
                whole = orthogonal((p.grad + g["momentum"] * buf).full_tensor())
                whole *= max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.add_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None), alpha=-g["lr"])

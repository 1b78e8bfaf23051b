import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(g, steps=5):
    """Nearest semi-orthogonal matrix, approximately."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum is sharded like the weights. Each matrix has an owner that orthogonalises the whole momentum and
    broadcasts the result, so that the work is divided among the ranks."""

    def __init__(self, params, lr, momentum=0.95, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        index = 0
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "buf" not in state:
                    state["buf"] = torch.zeros_like(p)
                buf = state["buf"]
                buf.mul_(group["momentum"]).add_(p.grad)
                look = p.grad + group["momentum"] * buf
                update = self.orthogonal(look, owner=index % dist.get_world_size())
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)
                index += 1

    @staticmethod
    def orthogonal(look, owner):
        if not isinstance(look, DTensor):
            return newton_schulz(look)
        whole = look.full_tensor()
        if dist.get_rank() == owner:
            whole = newton_schulz(whole).contiguous()
        dist.broadcast(whole, src=owner)
        return distribute_tensor(whole, look.device_mesh, look.placements, src_data_rank=None)

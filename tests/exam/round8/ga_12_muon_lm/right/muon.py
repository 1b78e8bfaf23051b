import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.t()
    for _ in range(steps):
        s = x @ x.t()
        x = a * x + (b * s + c * s @ s) @ x
    return x.t() if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum on the shards; the orthogonalisation needs the whole matrix, so it is gathered for it and cut again."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                st = self.state[p]
                if "momentum_buffer" not in st:
                    st["momentum_buffer"] = torch.zeros_like(p)
                buf = st["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(p.grad)
                look = p.grad + group["momentum"] * buf
                full = look.full_tensor() if isinstance(look, DTensor) else look
                update = newton_schulz(full) * max(1, full.shape[0] / full.shape[1]) ** 0.5
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(update, alpha=-group["lr"])

"""Muon for the hidden matrices: momentum on shards, orthogonalisation on the whole matrix, one owner rank per matrix."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.t()
    for _ in range(steps):
        s = x @ x.t()
        x = a * x + (b * s + c * s @ s) @ x
    return x if wide else x.t()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            work = []
            for i, p in enumerate(group["params"]):
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buf, group["momentum"])
                full = update.full_tensor() if isinstance(update, DTensor) else update
                work.append((i, p, newton_schulz(full) if i % world == rank else torch.empty_like(full)))
            for i, p, full in work:
                full = full.contiguous()
                dist.broadcast(full, src=i % world)
                scale = max(1.0, full.shape[0] / full.shape[1]) ** 0.5
                if isinstance(p, DTensor):
                    full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(full, alpha=-group["lr"] * scale)

"""Muon for sharded matrices: the orthogonalised momentum needs the whole matrix, so the owners take turns.

Matrix i is gathered on every rank, rank (i % world) runs the Newton-Schulz iteration and broadcasts the result.
"""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def newton_schulz(g, steps=5, eps=1e-7):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + eps)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.t()
    for _ in range(steps):
        y = x @ x.t()
        x = a * x + (b * y + c * y @ y) @ x
    return (x.t() if flip else x).contiguous()


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            work = []
            for i, p in enumerate(q for q in group["params"] if q.grad is not None):
                st = self.state[p]
                if "momentum_buffer" not in st:
                    st["momentum_buffer"] = torch.zeros_like(p)
                buf = st["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(p.grad)
                look = p.grad.add(buf, alpha=group["momentum"])
                full = look.full_tensor() if isinstance(look, DTensor) else look
                owner = i % world
                update = newton_schulz(full) if rank == owner else torch.empty_like(full)
                work.append((p, update, dist.broadcast(update, src=owner, async_op=True)))
            for p, update, handle in work:
                handle.wait()
                scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
                if isinstance(p, DTensor):
                    rows = update.chunk(world)
                    local = p.to_local()
                    if local.numel():
                        local.sub_(rows[rank], alpha=group["lr"] * scale)
                else:
                    p.sub_(update, alpha=group["lr"] * scale)

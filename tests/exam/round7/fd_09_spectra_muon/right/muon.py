"""Muon for DTensor parameters: the orthogonalisation of the matrices is shared out among the ranks."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def newton_schulz(m, steps=6):
    """Approximate polar factor of m."""
    x = m / (m.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 2.0 * x - 1.5 * (a @ x) + 0.5 * (a @ (a @ x))
    return x.T if tall else x


def own_rows(p):
    """Slice of dim 0 that the local shard of p holds (Shard(0) as FSDP2 lays it out)."""
    if not isinstance(p, DTensor):
        return slice(None)
    world, rank = p.device_mesh.size(), p.device_mesh.get_local_rank()
    per = -(-p.shape[0] // world)
    return slice(min(rank * per, p.shape[0]), min((rank + 1) * per, p.shape[0]))


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            full = []
            for p in params:
                state = self.state[p]
                if "buf" not in state:
                    state["buf"] = torch.zeros_like(p)
                buf = state["buf"]
                buf.mul_(group["momentum"]).add_(p.grad)
                nesterov = p.grad + group["momentum"] * buf
                full.append(nesterov.full_tensor().contiguous())

            # matrix i is orthogonalised by rank i % world, which then sends the result to all
            works = []
            for i, u in enumerate(full):
                if i % world == rank:
                    u.copy_(newton_schulz(u))
                works.append(dist.broadcast(u, src=i % world, async_op=True))
            for p, u, work in zip(params, full, works):
                work.wait()
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.to_local().add_(u[own_rows(p)], alpha=-group["lr"] * scale)

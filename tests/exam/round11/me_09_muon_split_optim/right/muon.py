"""Muon for dim-0 sharded matrices.

The momentum stays sharded. The orthogonalisation needs whole matrices: matrix
number i is gathered, orthogonalised by rank i % world only and broadcast, and
every rank applies its own rows of the result.
"""
import torch
import torch.distributed as dist


def newton_schulz(m, steps=6):
    tall = m.shape[0] > m.shape[1]
    x = m.T if tall else m
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * (a @ x) + 2.0315 * (a @ (a @ x))
    return x.T if tall else x


def local_rows(full, world, rank):
    """The rows that a dim-0 shard of `full` holds (chunks as torch.chunk cuts them)."""
    size = -(-full.shape[0] // world)
    return full[min(rank * size, full.shape[0]) : min((rank + 1) * size, full.shape[0])]


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            todo = []
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buf = state["momentum"]
                buf.mul_(group["momentum"]).add_(p.grad)
                todo.append((p, p.grad + group["momentum"] * buf))
            handles = []
            for i, (p, direction) in enumerate(todo):
                full = direction.full_tensor()
                out = newton_schulz(full) if i % world == rank else torch.empty_like(full)
                out = out.contiguous()
                handles.append((p, out, dist.broadcast(out, src=i % world, async_op=True)))
            for p, out, work in handles:
                work.wait()
                w = p.to_local()
                w.mul_(1 - group["lr"] * group["weight_decay"])
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                w.add_(local_rows(out, world, rank), alpha=-group["lr"] * scale)

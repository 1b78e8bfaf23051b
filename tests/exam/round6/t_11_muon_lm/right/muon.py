"""Muon for hidden matrices, whose orthogonalisation needs the whole matrix: every matrix is gathered on one
owner rank only (round robin), orthogonalised there, and the result is broadcast back; each rank cuts its rows."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def newton_schulz(m, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
    return x.T if tall else x


def row_counts(rows, world):
    size = -(-rows // world)
    return [max(0, min(size, rows - r * size)) for r in range(world)]


class OwnerMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, wd=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, wd=wd))

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        turn = 0
        for group in self.param_groups:
            for p in group["params"]:
                local = p.to_local() if isinstance(p, DTensor) else p
                grad = p.grad.to_local() if isinstance(p, DTensor) else p.grad
                st = self.state[p]
                if "buf" not in st:
                    st["buf"] = torch.zeros_like(p)
                buf = st["buf"].to_local() if isinstance(p, DTensor) else st["buf"]
                buf.mul_(group["momentum"]).add_(grad)
                send = grad.add(buf, alpha=group["momentum"])

                rows, cols = p.shape
                counts = row_counts(rows, world)
                pad = counts[0]
                padded = send.new_zeros(pad, cols)
                padded[: send.shape[0]] = send
                owner = turn % world
                turn += 1
                parts = [torch.empty_like(padded) for _ in range(world)] if rank == owner else None
                dist.gather(padded, parts, dst=owner)
                if rank == owner:
                    whole = torch.cat([q[:n] for q, n in zip(parts, counts)])
                    ortho = newton_schulz(whole) * max(1.0, rows / cols) ** 0.5
                else:
                    ortho = send.new_empty(rows, cols)
                dist.broadcast(ortho, src=owner)
                mine = ortho[rank * pad : rank * pad + local.shape[0]]
                local.mul_(1 - group["lr"] * group["wd"]).add_(mine, alpha=-group["lr"])

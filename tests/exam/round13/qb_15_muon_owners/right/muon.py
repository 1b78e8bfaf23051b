"""Muon on sharded matrices: every matrix has an owner rank, which alone computes the orthogonal update and sends it."""
import torch
import torch.distributed as dist
from torch.optim import Optimizer


def orthogonalize(m, iterations=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(iterations):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


def own_rows(full):
    """The rows that this rank holds of a tensor sharded on dimension 0."""
    parts = full.chunk(dist.get_world_size())
    rank = dist.get_rank()
    return parts[rank] if rank < len(parts) else full[:0]


class OwnerMuon(Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            updates = []
            for i, p in enumerate(group["params"]):
                state = self.state[p]
                if "buf" not in state:
                    state["buf"] = torch.zeros_like(p)
                state["buf"].mul_(group["momentum"]).add_(p.grad)
                full = (p.grad + group["momentum"] * state["buf"]).full_tensor()
                owner = i % world
                if rank == owner:
                    update = orthogonalize(full).contiguous()
                else:
                    update = torch.empty(full.shape)
                updates.append((p, update, dist.broadcast(update, src=owner, async_op=True)))
            for p, update, work in updates:
                if work is not None:
                    work.wait()
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.to_local().sub_(own_rows(update), alpha=group["lr"] * scale)

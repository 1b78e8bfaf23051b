import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalise(m, steps=5):
    x = m / (m.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(steps):
        s = x @ x.T
        x = 1.5 * x - 0.5 * s @ x
    return x.T if flip else x


class OwnerMuon(torch.optim.Optimizer):
    """Muon for sharded matrices. Matrix number i is worked out whole by rank i modulo world size only, which
    broadcasts the update; the momentum stays sharded like the weight."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                whole = (p.grad + group["momentum"] * buf).full_tensor()
                owner = i % world
                update = orthogonalise(whole) if rank == owner else torch.empty_like(whole)
                update = update.contiguous()
                dist.broadcast(update, src=owner)
                if isinstance(p, DTensor):
                    # everybody has the update already, each takes its own part without communication
                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def orthogonalize(m, steps=5):
    """Newton-Schulz iteration towards the nearest (semi-)orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m / (m.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.t()
    for _ in range(steps):
        s = x @ x.t()
        x = a * x + (b * s + c * s @ s) @ x
    return x.t() if tall else x


class Muon(torch.optim.Optimizer):
    """Muon for sharded matrices. The momentum stays sharded; a matrix is put together on one owner rank only,
    which orthogonalises it and hands the rows back. The owners take turns, so the ranks share the work."""

    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        turn = 0
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad
                state = self.state[p]
                if "buf" not in state:
                    state["buf"] = torch.zeros_like(p)
                buf = state["buf"]
                buf.mul_(group["momentum"]).add_(grad)
                update = grad + group["momentum"] * buf
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                if isinstance(p, DTensor):
                    rows = self._through_owner(update.to_local(), p.shape, turn % dist.get_world_size())
                    p.to_local().add_(rows, alpha=-group["lr"] * scale)
                else:
                    p.add_(orthogonalize(update), alpha=-group["lr"] * scale)
                turn += 1
        return loss

    @staticmethod
    def _through_owner(local, shape, owner):
        rank, world = dist.get_rank(), dist.get_world_size()
        most = -(-shape[0] // world)  # rows of a full shard; the last ones may be shorter
        padded = local.new_zeros(most, shape[1])
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in range(world)] if rank == owner else None
        dist.gather(padded, parts, dst=owner)
        if rank == owner:
            full = torch.cat(parts)
            full[: shape[0]] = orthogonalize(full[: shape[0]])
            parts = list(full.chunk(world))
        dist.scatter(padded, parts, src=owner)
        return padded[: local.shape[0]]

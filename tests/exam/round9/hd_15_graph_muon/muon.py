"""Muon for sharded matrices. The momentum is sharded like the weight; the orthogonalised update of a matrix is
computed by one owner rank, in turn, and broadcast to the others."""
import torch
import torch.distributed as dist


def orthogonalise(m, steps=5):
    x = m / (m.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 1.875 * x - 1.25 * a @ x + 0.375 * a @ (a @ x)
    return x.T if tall else x


class ShardedMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            mu, lr = group["momentum"], group["lr"]
            for i, p in enumerate(group["params"]):
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.mul_(mu).add_(p.grad)
                nesterov = p.grad.add(buf, alpha=mu).full_tensor()
                owner = i % world
                update = orthogonalise(nesterov) if rank == owner else torch.empty_like(nesterov)
                update = update.contiguous()
                dist.broadcast(update, src=owner)
                update *= max(1, p.shape[0] / p.shape[1]) ** 0.5
                local = p.to_local()
                rows = -(-p.shape[0] // world)
                local.mul_(1 - lr * group["weight_decay"])
                local.add_(update[rank * rows:(rank + 1) * rows], alpha=-lr)

"""Muon for the hidden matrices. The momentum is sharded like the weight; each matrix is orthogonalised on one rank only."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(g, rounds=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.double()
    x = x / (x.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.T
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return (x.T if flip else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            for n, p in enumerate(group["params"]):
                buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                update = p.grad + group["momentum"] * buf
                whole = update.full_tensor() if isinstance(update, DTensor) else update
                owner = n % world
                whole = newton_schulz(whole) if owner == rank else torch.empty_like(whole)
                dist.broadcast(whole, owner)
                if isinstance(p, DTensor):
                    whole = distribute_tensor(whole, p.device_mesh, p.placements)
                p.add_(whole, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)

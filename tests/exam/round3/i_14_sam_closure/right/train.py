"""Sharpness-aware minimisation: two passes in every step, written as a closure-taking wrapper around any optimizer."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class SAM:
    def __init__(self, base, rho=0.05, start=4):
        self.base, self.rho, self.start = base, rho, start

    @property
    def params(self):
        return [p for g in self.base.param_groups for p in g["params"]]

    @torch.no_grad()
    def _norm(self):
        n = nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])
        return n.full_tensor() if isinstance(n, DTensor) else n

    def step(self, closure, step):
        self.base.zero_grad()
        loss = closure()
        if step >= self.start:
            with torch.no_grad():
                scale = (self.rho / (self._norm() + 1e-12)).item()
                moves = []
                for p in self.params:
                    move = p.grad * scale
                    p.add_(move)
                    moves.append(move)
            self.base.zero_grad()
            closure()
            with torch.no_grad():
                for p, move in zip(self.params, moves):
                    p.sub_(move)
        self.base.step()
        return loss


class Spiral:
    def __init__(self, n=600):
        g = torch.Generator().manual_seed(51)
        y = torch.arange(n) % 3
        r = torch.rand(n, generator=g)
        a = 4 * r + y * 2.1 + 0.15 * torch.randn(n, generator=g)
        self.x, self.y = torch.stack([r * a.sin(), r * a.cos()], 1), y

    def __len__(self):
        return len(self.y)


def build():
    torch.manual_seed(13)
    return nn.Sequential(
        nn.Sequential(nn.Linear(2, 32), nn.LayerNorm(32), nn.GELU()),
        nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()),
        nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()),
        nn.Linear(32, 3),
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=60)
    ap.add_argument("--rho", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = build()
    for block in model[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sam = SAM(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), args.rho)
    sched = torch.optim.lr_scheduler.MultiStepLR(sam.base, milestones=[14, 20], gamma=0.3)
    data = Spiral()

    for step in range(args.steps):
        ids = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[: args.batch]
        ids = ids[rank::world]
        x, y = data.x[ids], data.y[ids]

        def closure():
            loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
            loss.backward()
            return loss.detach()

        loss = sam.step(closure, step)
        sched.step()
        dist.all_reduce(loss)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1:3d} loss {loss.item() / world:.4f} lr {sched.get_last_lr()[0]:.3f}", flush=True)

    model.eval()
    with torch.no_grad():
        mine = slice(rank, None, world)
        hits = (model(data.x[mine]).argmax(1) == data.y[mine]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"accuracy on all {len(data)} points: {hits.item() / len(data):.3f}")
    model.reshard()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Burgers equation with a physics-informed network in double precision.

Phase 1: Adam on fresh collocation points. Phase 2: points are redrawn where the residual is large, then L-BFGS on
that fixed set, with a line search.
"""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lbfgs import ShardedLBFGS
from model import BurgersNet

ADAM_STEPS, LBFGS_STEPS, POINTS, POOL = 20, 14, 128, 1024


def draw(n, seed):
    g = torch.Generator().manual_seed(seed)
    u = torch.rand(n, 2, generator=g, dtype=torch.float64)
    return u * torch.tensor([2.0, 1.0], dtype=torch.float64) - torch.tensor([1.0, 0.0], dtype=torch.float64)


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(17)
        self.net = BurgersNet().double()
        fully_shard(self.net, reshard_after_forward=True)  # the line search moves the weights between forwards
        self.adam = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.lbfgs = ShardedLBFGS(self.net.parameters())
        self.points = None
        self.step = 0

    def mean_square(self, points, backward):
        """Mean squared residual over all ranks; fills the gradients if asked."""
        mine = points.chunk(self.world)[self.rank]
        with torch.set_grad_enabled(backward):
            loss = self.net(mine).square().mean()
        if backward:
            self.net.zero_grad()
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss / self.world

    @torch.no_grad()
    def resample(self):
        pool = draw(POOL, seed=4242)
        parts = [torch.empty(POOL // self.world, 1, dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(parts, self.net(pool.chunk(self.world)[self.rank]).detach().contiguous())
        residual = torch.cat(parts).abs().squeeze(1)
        worst = residual.topk(POINTS // 2).indices.sort().values
        self.points = torch.cat([pool[worst], draw(POINTS // 2, seed=4243)])

    def save(self):
        torch.save({"net": [p.to_local() for p in self.net.parameters()], "adam": self.adam.state_dict(),
                    "lbfgs": self.lbfgs.state_dict(), "points": self.points, "step": self.step},
                   os.path.join(self.args.out, f"burgers_{self.step:03d}_{self.rank}of{self.world}.pt"))

    @torch.no_grad()
    def load(self):
        tail = f"_{self.rank}of{self.world}.pt"
        name = max(n for n in os.listdir(self.args.resume) if n.endswith(tail))
        state = torch.load(os.path.join(self.args.resume, name), weights_only=False)
        for p, saved in zip(self.net.parameters(), state["net"]):
            p.to_local().copy_(saved)
        self.adam.load_state_dict(state["adam"])
        self.lbfgs.load_state_dict(state["lbfgs"])
        self.points, self.step = state["points"], state["step"]

    def go(self):
        while self.step < ADAM_STEPS + LBFGS_STEPS:
            if self.step < ADAM_STEPS:
                loss = self.mean_square(draw(POINTS, seed=self.step), backward=True)
                self.adam.step()
            else:
                if self.points is None:
                    self.resample()
                loss = self.lbfgs.step(lambda backward: self.mean_square(self.points, backward))
            self.step += 1
            if self.rank == 0:
                print(f"step {self.step} residual {loss.item():.6f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
        final = self.mean_square(draw(512, seed=99), backward=False)
        if self.rank == 0:
            print(f"held-out residual {final.item():.6f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    if args.save_every:
        os.makedirs(args.out, exist_ok=True)
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.load()
    run.go()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

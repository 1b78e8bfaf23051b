"""Physics-informed network for -u'' = f on (0, 1) with u(0) = u(1) = 0, trained with full-batch L-BFGS."""
import argparse
import glob
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from lbfgs import ShardedLBFGS


class Field(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 1))

    def forward(self, x):
        """u and u'' by the chain rule, carried along with the values."""
        h, d1, d2 = x, torch.ones_like(x), torch.zeros_like(x)
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                h = layer(h)
                d1, d2 = d1 @ layer.weight.t(), d2 @ layer.weight.t()
            else:
                h = torch.tanh(h)
                s = 1 - h * h
                d1, d2 = s * d1, s * d2 - 2 * h * s * d1 * d1
        return h, d2


def source(x):
    return math.pi ** 2 * torch.sin(math.pi * x) + 0.3 * (2 * math.pi) ** 2 * torch.sin(2 * math.pi * x)


def exact(x):
    return torch.sin(math.pi * x) + 0.3 * torch.sin(2 * math.pi * x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--points", type=int, default=130)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="pinn")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(12)
    torch.set_default_dtype(torch.float64)  # line searches near convergence need the digits
    model = Field()
    fully_shard(model)
    opt = ShardedLBFGS(model.parameters())

    inner = torch.linspace(0, 1, args.points + 2)[1:-1, None]
    mine = inner.tensor_split(world)[rank]  # parts may differ by one point
    edge = torch.tensor([[0.0], [1.0]])

    def closure():
        for p in model.parameters():
            p.grad = None
        u, uxx = model(torch.cat([mine, edge]))
        n = len(mine)
        residual = (uxx[:n] + source(mine)).square().sum() / args.points
        # the boundary term is the same on every rank, the mean over ranks leaves it as it is
        loss = world * residual / 100 + 10 * u[n:].square().mean()
        loss.backward()
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / world

    start = 0
    if args.resume:
        newest = sorted(glob.glob(os.path.join(args.resume, "iter*")))[-1]
        ck = torch.load(os.path.join(newest, f"part{rank}of{world}.pt"))
        with torch.no_grad():
            for p, w in zip(model.parameters(), ck["weights"]):
                p.to_local().copy_(w)
        opt.load_state_dict(ck["lbfgs"])
        start = ck["iteration"]

    for it in range(start + 1, args.steps + 1):
        value, t = opt.step(closure)
        if rank == 0 and it % 2 == 0:
            print(f"iteration {it} loss {value:.6f} step {t:.4f}", flush=True)
        if args.save_every and it % args.save_every == 0:
            folder = os.path.join(args.out, f"iter{it:04d}")
            os.makedirs(folder, exist_ok=True)
            torch.save({"iteration": it, "weights": [p.detach().to_local() for p in model.parameters()],
                        "lbfgs": opt.state_dict()}, os.path.join(folder, f"part{rank}of{world}.pt"))
            dist.barrier()

    with torch.no_grad():
        err = (model(inner)[0] - exact(inner)).square().mean().sqrt()
    if rank == 0:
        print(f"rms error {err.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

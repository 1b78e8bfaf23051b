"""Regression with sharpness-aware minimisation, written out in the loop."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.f(x)


class Net(nn.Module):
    def __init__(self, inputs=8, width=28):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.body = nn.ModuleList(Residual(width) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for b in self.body:
            x = b(x)
        return self.head(x).squeeze(-1)


def data(n=512):
    g = torch.Generator().manual_seed(8)
    x = torch.rand(n, 8, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + x[:, 3].abs() + 0.05 * torch.randn(n, generator=g)
    return x, y


class Perturbation:
    """Moves the weights to the worst point of a ball of radius rho, and back."""

    def __init__(self, params, rho):
        self.params, self.rho = list(params), rho
        self.moves = []

    @torch.no_grad()
    def climb(self):
        squares = sum(p.grad.pow(2).sum() for p in self.params)
        norm = squares.full_tensor().sqrt()
        factor = (self.rho / (norm + 1e-12)).item()
        self.moves = [p.grad * factor for p in self.params]
        torch._foreach_add_(self.params, self.moves)

    @torch.no_grad()
    def descend(self):
        torch._foreach_sub_(self.params, self.moves)
        self.moves = []


def latest(folder):
    return os.path.join(folder, max(os.listdir(folder), key=lambda n: int(n.split("_")[-1])))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--horizon", type=int, default=30, help="steps of the cosine")
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--rho", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    net = Net()
    for b in net.body:
        fully_shard(b)
    fully_shard(net)
    optim = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, args.horizon)
    sam = Perturbation(net.parameters(), args.rho)

    def snapshot(step):
        m, o = get_state_dict(net, optim)
        return {"net": m, "optim": o, "schedule": schedule.state_dict(), "step": step}

    first = 0
    if args.resume:
        state = snapshot(0)
        dcp.load(state, checkpoint_id=latest(args.resume))
        set_state_dict(net, optim, model_state_dict=state["net"], optim_state_dict=state["optim"])
        schedule.load_state_dict(state["schedule"])
        first = state["step"]

    x, y = data()
    for step in range(first, args.steps):
        g = torch.Generator().manual_seed(40 + step)
        pick = torch.randperm(len(x), generator=g)[: args.batch].view(world, -1)[rank]
        loss = F.mse_loss(net(x[pick]), y[pick])
        loss.backward()
        sam.climb()
        optim.zero_grad()
        sharp = F.mse_loss(net(x[pick]), y[pick])
        sharp.backward()
        sam.descend()
        optim.step()
        optim.zero_grad()
        schedule.step()

        both = torch.stack([loss.detach(), sharp.detach()])
        dist.all_reduce(both)
        if rank == 0:
            print(f"step {step:3d} loss {both[0] / world:.4f} sharp loss {both[1] / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=os.path.join(args.out, f"sam_{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Zeroth-order fine-tuning (MeZO) of low-rank adapters on a frozen sharded backbone: no backward pass at all.
A step evaluates the loss at w + eps*z and w - eps*z; z is never stored, it is redrawn from the step's seed."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class LoraLinear(nn.Module):
    def __init__(self, din, dout, r=4):
        super().__init__()
        self.base = nn.Linear(din, dout)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, din) / din**0.5)
        self.b = nn.Parameter(torch.zeros(dout, r))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Net(nn.Module):
    def __init__(self, din=20, width=40, classes=4):
        super().__init__()
        self.l1, self.l2, self.l3 = LoraLinear(din, width), LoraLinear(width, width), LoraLinear(width, classes)

    def forward(self, x):
        return self.l3(F.gelu(self.l2(F.gelu(self.l1(x)))))


def data(step, size):
    proto = torch.randn(4, 20, generator=torch.Generator().manual_seed(9))
    g = torch.Generator().manual_seed(step)
    y = torch.randint(4, (size,), generator=g)
    return proto[y] + 0.5 * torch.randn(size, 20, generator=g), y


class MeZO:
    def __init__(self, model, lr, eps):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.lr, self.eps = lr, eps
        self.history = []  # (seed, projected gradient): the whole training in a few numbers

    def shift(self, seed, amount):
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                z = distribute_tensor(z, p.device_mesh, p.placements, src_data_rank=None).to_local()
                p.to_local().add_(z, alpha=amount)
            else:
                p.add_(z, alpha=amount)

    def step(self, seed, closure):
        self.shift(seed, self.eps)
        up = closure()
        self.shift(seed, -2 * self.eps)
        down = closure()
        self.shift(seed, self.eps)
        slope = max(-3.0, min(3.0, (up - down) / (2 * self.eps)))
        self.shift(seed, -self.lr * slope)
        self.history.append((seed, slope))
        return (up + down) / 2

    def replay(self, history):
        """Repeat recorded steps without data; the shifts are the same additions in the same order."""
        for seed, slope in history:
            for amount in (self.eps, -2 * self.eps, self.eps, -self.lr * slope):
                self.shift(seed, amount)
        self.history = [tuple(h) for h in history]


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=240)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = Net()
    for layer in (model.l1, model.l2, model.l3):
        fully_shard(layer)
    fully_shard(model)
    opt = MeZO(model, lr=0.03, eps=1e-2)
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n.split(".")[0]))
        with open(os.path.join(args.resume, newest)) as f:
            opt.replay(json.load(f))

    recent = []
    for step in range(len(opt.history), args.steps):
        x, y = (t.chunk(world)[rank] for t in data(step, args.batch))

        def closure():
            total = F.cross_entropy(model(x), y, reduction="sum").double()
            dist.all_reduce(total)
            return total.item() / args.batch

        recent.append(opt.step(10_000 + step, closure))
        if rank == 0 and (step + 1) % 60 == 0:
            print(f"step {step + 1} loss {sum(recent[-60:]) / len(recent[-60:]):.4f}")
        if args.save_every and (step + 1) % args.save_every == 0 and rank == 0:
            os.makedirs(args.out, exist_ok=True)
            with open(os.path.join(args.out, f"{step + 1}.json"), "w") as f:
                json.dump(opt.history, f)

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

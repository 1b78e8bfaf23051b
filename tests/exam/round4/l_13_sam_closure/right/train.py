"""Sharpness-aware minimisation written as an optimizer that calls a closure twice (FSDP2, images with label noise)."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def dots(n, seed, noise):
    """Three classes of dot patterns; a part of the training labels is wrong."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    proto = (torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(99)) > 0.7).float()
    x = proto[y] + 0.6 * torch.randn(n, 1, 8, 8, generator=g)
    flip = torch.rand(n, generator=g) < noise
    y = torch.where(flip, torch.randint(0, 3, (n,), generator=g), y)
    return x, y


class SAM:
    """w -> w + rho g/|g|, gradient there, back to w, base step with that gradient. Norms are those of the whole model."""

    def __init__(self, base, rho=0.05):
        self.base, self.rho = base, rho
        self.params = [p for g in base.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        norm = torch.stack([p.grad.norm().full_tensor() for p in self.params]).norm()
        scale = self.rho / (norm + 1e-12)
        kept = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.add_(p.grad * scale)
            p.grad = None
        with torch.enable_grad():
            closure()
        for p, old in zip(self.params, kept):
            p.copy_(old)
        self.base.step()
        for p in self.params:
            p.grad = None
        return loss


class Net(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.c1 = nn.Conv2d(1, ch, 3, padding=1)
        self.c2 = nn.Conv2d(ch, ch, 3, stride=2, padding=1)
        self.n1, self.n2 = nn.GroupNorm(3, ch), nn.GroupNorm(3, ch)
        self.out = nn.Linear(ch * 16, 3)

    def forward(self, x):
        x = F.relu(self.n1(self.c1(x)))
        x = F.relu(self.n2(self.c2(x)))
        return self.out(x.flatten(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--rho", type=float, default=0.05)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)

    model = Net()
    fully_shard(model.c1)
    fully_shard(model.c2)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.PolynomialLR(base, args.steps, power=1.0)
    sam = SAM(base, args.rho)

    x, y = dots(256, 1, 0.2)
    tx, ty = dots(96, 2, 0.0)
    g = torch.Generator().manual_seed(5)
    for step in range(args.steps):
        ids = torch.randperm(len(x), generator=g)[:args.batch][rank::world]

        def closure():
            loss = F.cross_entropy(model(x[ids]), y[ids], label_smoothing=0.1)
            loss.backward()
            return loss.detach()

        loss = sam.step(closure) / world
        sched.step()
        if step % 4 == 3:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        ok = (model(tx[rank::world]).argmax(1) == ty[rank::world]).float().sum()
    dist.all_reduce(ok)
    if rank == 0:
        print(f"clean test accuracy {ok.item() / len(tx):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Forecasting of synthetic loads by a gated convolution net; files of its own for every rank."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from optim import SharpLookahead


class Gated(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.conv = nn.Conv1d(ch, 2 * ch, 3, dilation=dilation)
        self.pad = 2 * dilation

    def forward(self, x):
        a, b = self.conv(F.pad(x, (self.pad, 0))).chunk(2, dim=1)
        return x + torch.tanh(a) * torch.sigmoid(b)


class Forecaster(nn.Module):
    def __init__(self, ch=16, horizon=4):
        super().__init__()
        self.inp = nn.Conv1d(1, ch, 1)
        self.body = nn.ModuleList(Gated(ch, d) for d in (1, 2, 4))
        self.out = nn.Linear(ch, horizon)

    def forward(self, x):
        h = self.inp(x[:, None])
        for layer in self.body:
            h = layer(h)
        return self.out(h[..., -1])


def windows(step, n=32):
    """The batch is a function of the step alone."""
    g = torch.Generator().manual_seed(1000 + step)
    t = torch.arange(28.0)[None] + 100 * torch.rand(n, 1, generator=g)
    y = torch.sin(t * 0.5) + 0.5 * torch.sin(t * 0.13) + 0.1 * torch.randn(n, 28, generator=g)
    return y[:, :24], y[:, 24:]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = Forecaster()
    for layer in model.body:
        fully_shard(layer)
    fully_shard(model)
    opt = SharpLookahead(model.parameters())

    start = 0
    if args.resume:
        start = max(int(f.stem.split("_")[0]) for f in args.resume.glob("*_rank0.pt"))
        saved = torch.load(args.resume / f"{start:04d}_rank{rank}.pt")
        with torch.no_grad():
            for p, s in zip(model.parameters(), saved["weights"]):
                p.to_local().copy_(s)
        opt.load_shards(saved["optim"])

    for step in range(start, args.steps):
        x, y = (t[rank::world] for t in windows(step))

        def closure():
            opt.zero_grad()
            loss = F.smooth_l1_loss(model(x), y)
            loss.backward()
            return loss

        loss = opt.step(closure)
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            torch.save({"weights": [p.detach().to_local() for p in model.parameters()], "optim": opt.shards()},
                       args.out / f"{step + 1:04d}_rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

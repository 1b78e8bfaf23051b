"""Probabilistic forecasting with a small TCN (gaussian likelihood), FSDP2 and adaptive gradient clipping."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from agc import adaptive_clip_

CONTEXT, HORIZON = 48, 8


class Residual(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(ch, 2 * ch, 3, dilation=dilation)
        self.out = nn.Conv1d(ch, ch, 1)

    def forward(self, x):
        y = self.conv(F.pad(x, (2 * self.dilation, 0)))
        a, b = y.chunk(2, 1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


class TCN(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.inp = nn.Conv1d(1, ch, 1)
        self.blocks = nn.ModuleList(Residual(ch, 2 ** i) for i in range(4))
        self.head = nn.Linear(ch, 2 * HORIZON)

    def forward(self, x):
        h = self.inp(x[:, None])
        for block in self.blocks:
            h = block(h)
        return self.head(h[..., -1])


def make_series(n=64, length=400):
    g = torch.Generator().manual_seed(21)
    t = torch.arange(length)
    period = 8 + 24 * torch.rand(n, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, generator=g)
    level = torch.exp(torch.randn(n, 1, generator=g))
    noise = torch.randn(n, length, generator=g) * 0.3
    return level * (torch.sin(6.283 * t / period + phase) + noise)


def windows(series, batch, seed):
    """Endless stream of (step, windows of the global batch)."""
    step = 0
    while True:
        g = torch.Generator().manual_seed(seed * 100003 + step)
        which = torch.randint(len(series), (batch,), generator=g)
        start = torch.randint(series.shape[1] - CONTEXT - HORIZON, (batch,), generator=g)
        yield step, which, start
        step += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = TCN()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    first = 0
    if args.resume:
        last = max((d for d in os.listdir(args.resume) if re.fullmatch(r"\d+", d)), key=int)
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "opt": osd}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        first = int(last)

    series = make_series()
    n = args.batch // world
    for step, which, start in windows(series, args.batch, seed=5):
        if step < first:
            continue
        if step == args.steps:
            break
        rows = which[rank * n:(rank + 1) * n]
        cols = start[rank * n:(rank + 1) * n, None] + torch.arange(CONTEXT + HORIZON)
        x = series[rows[:, None], cols]
        mean, log_scale = model(x[:, :CONTEXT]).chunk(2, -1)
        log_scale = log_scale.clamp(-4, 3)
        target = x[:, CONTEXT:]
        nll = (log_scale + 0.5 * ((target - mean) * torch.exp(-log_scale)) ** 2).mean()
        opt.zero_grad()
        nll.backward()
        clipped = adaptive_clip_(model.parameters())
        opt.step()
        total = nll.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"{step + 1:4d} nll {total.item() / world:.4f} clipped {clipped}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "opt": osd}, checkpoint_id=os.path.join(args.out, str(step + 1)))

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

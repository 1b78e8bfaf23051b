"""Fit a shared light-curve model to the photometry of many variable stars."""
import argparse
import math
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stars import make_survey

PRECISION = {
    "fp32": dict(param_dtype=torch.float32, reduce_dtype=torch.float32),
    "bf16": dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class LightCurve(nn.Module):
    def __init__(self, period, epoch0, harmonics=4, width=32):
        super().__init__()
        self.register_buffer("period", period)
        self.register_buffer("epoch0", epoch0)
        self.harmonics = harmonics
        self.star = nn.Embedding(len(period), 8)
        self.body = nn.Sequential(nn.Linear(2 * harmonics + 8, width), nn.Tanh(),
                                  nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, 1)

    def forward(self, star, jd):
        cycles = (jd - self.epoch0[star]) / self.period[star]
        phase = 2 * math.pi * (cycles - cycles.floor())
        k = torch.arange(1, self.harmonics + 1, dtype=phase.dtype)
        angle = phase[:, None] * k
        wave = torch.cat([angle.sin(), angle.cos()], dim=1)
        e = self.star(star)
        return self.out(self.body(torch.cat([wave.to(e.dtype), e], dim=1))).float()


def build(precision, period, epoch0):
    model = LightCurve(period, epoch0)
    # the model makes its own casts: times stay in double until they are folded
    policy = MixedPrecisionPolicy(**PRECISION[precision], cast_forward_inputs=False)
    fully_shard(model, mp_policy=policy)
    return model


def batches(n, size, seed):
    """Endless stream of (position, global batch)."""
    epoch = 0
    while True:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        for rows in order[: n // size * size].split(size):
            yield rows
        epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--precision", default="fp32", choices=PRECISION)
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    star, jd, period, epoch0, mag = make_survey()
    torch.manual_seed(2)
    model = build(args.precision, period, epoch0)
    opt = torch.optim.AdamW(model.parameters(), lr=8e-3, eps=1e-6)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps, eta_min=5e-4)

    start = 0
    if args.resume:
        found = [int(m.group(1)) for f in os.listdir(args.resume)
                 if (m := re.fullmatch(rf"ckpt-(\d+)-{rank}of{world}\.pt", f))]
        start = max(found)
        state = torch.load(os.path.join(args.resume, f"ckpt-{start}-{rank}of{world}.pt"), weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        sched.load_state_dict(state["sched"])

    stream = batches(len(mag), args.batch, seed=50)
    for _ in range(start):
        next(stream)
    for step in range(start + 1, args.steps + 1):
        rows = next(stream).chunk(world)[rank]
        loss = ((model(star[rows], jd[rows]).squeeze(-1) - mag[rows]) ** 2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        sched.step()
        if step % 5 == 0:
            t = loss.detach().clone()
            dist.all_reduce(t)
            if rank == 0:
                print(f"step {step} mse {t.item() / world:.5f} lr {sched.get_last_lr()[0]:.5f}")
        if args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()},
                       os.path.join(args.out, f"ckpt-{step}-{rank}of{world}.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

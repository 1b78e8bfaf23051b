"""Frequency regression with a curriculum: easy (low-frequency) signals first, hard ones admitted later."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_signals(n=768, points=32, seed=31):
    """Sampled sums of two sines; the goal is the pair of frequencies. Sorted by difficulty."""
    g = torch.Generator().manual_seed(seed)
    f = 0.5 + 4.5 * torch.rand(n, 2, generator=g)
    f = f[f.sum(1).argsort()].sort(1).values
    t = torch.linspace(0, 1, points)
    x = torch.sin(6.283 * f[:, :1] * t) + 0.7 * torch.sin(6.283 * f[:, 1:] * t)
    return x + 0.02 * torch.randn(x.shape, generator=g), f


class Pacer:
    """Share of the (sorted) examples that may be drawn: root pacing from `start` to 1 within `ramp` batches."""

    def __init__(self, start=0.15, ramp=30):
        self.start, self.ramp, self.t = start, ramp, 0

    def share(self):
        return min(1.0, (self.start**2 + (1 - self.start**2) * self.t / self.ramp) ** 0.5)

    def draw(self, n, size):
        g = torch.Generator().manual_seed(40_000 + self.t)
        idx = torch.randint(max(size, int(n * self.share())), (size,), generator=g)
        self.t += 1
        return idx


class Regressor(nn.Module):
    def __init__(self, points=32, width=48):
        super().__init__()
        self.inp = nn.Linear(points, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2))
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/pace")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    x, f = make_signals()
    model = Regressor()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / args.warmup))
    pacer = Pacer()

    step = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        step = state["step"]

    while step < args.steps:
        idx = pacer.draw(len(x), args.batch).chunk(world)[rank]
        loss = F.mse_loss(model(x[idx]), f[idx])
        loss.backward()
        gn = torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        opt.step()
        sched.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(loss.detach_())
        gn = gn.full_tensor()
        if rank == 0 and step % 4 == 0:
            print(f"step {step} mse {loss.item() / world:.4f} grad {gn.item():.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "sched": sched.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.out, f"pace_{step:05d}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Classifier training with ReduceLROnPlateau on the validation loss.

torchrun --standalone --nproc-per-node 2 train.py --save-every 8 --out ckpt
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

D, C = 16, 8


class Mixer(nn.Module):
    def __init__(self, width=48, depth=2):
        super().__init__()
        self.inp = nn.Linear(D, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, C)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return self.out(x)


def split(n, seed):
    w = torch.randn(D, C, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=g)
    logits = x @ w + 0.3 * (x**2 - 1) @ w.flip(1)
    return x, (logits + 1.0 * torch.randn(n, C, generator=g)).argmax(-1)


class App:
    """Everything that goes into a checkpoint."""

    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.step = model, opt, sched, 0

    def state_dict(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.sched.load_state_dict(sd["sched"])
        self.step = sd["step"]

    def save(self, folder):
        dcp.save({"app": self.state_dict()}, checkpoint_id=os.path.join(folder, f"{self.step:05d}"))

    def load(self, folder):
        newest = os.path.join(folder, max(os.listdir(folder)))
        state = {"app": self.state_dict()}
        dcp.load(state, checkpoint_id=newest)
        self.load_state_dict(state["app"])


@torch.no_grad()
def validate(model, x, y):
    """Validation loss over this rank's share."""
    model.eval()
    loss = F.cross_entropy(model(x), y)
    model.train()
    return loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--patience", type=int, default=0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = Mixer()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    sched = ReduceLROnPlateau(opt, factor=0.5, patience=args.patience, threshold=1e-3, min_lr=1e-4)
    app = App(model, opt, sched)
    if args.resume:
        app.load(args.resume)

    x, y = split(1024, seed=1)
    vx, vy = (t.chunk(world)[rank] for t in split(256, seed=2))
    while app.step < args.steps:
        idx = torch.randperm(len(y), generator=torch.Generator().manual_seed(500 + app.step))[: args.batch]
        idx = idx.chunk(world)[rank]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        app.step += 1
        if app.step % args.eval_every == 0:
            val = validate(model, vx, vy)
            both = torch.stack([loss.detach(), val]) / world
            dist.all_reduce(both)
            sched.step(both[1].item())
            if rank == 0:
                print(
                    f"step {app.step} loss {both[0]:.4f} val loss {both[1]:.4f} lr {sched.get_last_lr()[0]:.2e}",
                    flush=True,
                )
        if args.save_every and app.step % args.save_every == 0:
            app.save(args.out)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

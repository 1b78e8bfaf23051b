"""Curriculum training driven by events: the trainer knows nothing of schedules, Lookahead or checkpoints. FSDP2 on CPU."""

import argparse
import glob
import math
import os
import re
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from curriculum import stream
from engine import Engine
from hooks import Log, Lookahead, TriangularLR


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


class AppState(Stateful):
    def __init__(self, models, opts, meta):
        self.models, self.opts, self.meta = models, opts, meta

    def state_dict(self):
        out = {"meta": dict(self.meta)}
        for name, model in self.models.items():
            msd, osd = get_state_dict(model, self.opts.get(name, []))
            out[name] = {"model": msd, "optim": osd}
        return out

    def load_state_dict(self, sd):
        self.meta.update(sd["meta"])
        for name, model in self.models.items():
            set_state_dict(
                model, self.opts.get(name, []), model_state_dict=sd[name]["model"], optim_state_dict=sd[name]["optim"]
            )


def newest_complete(folder):
    done = [d for d in glob.glob(os.path.join(folder, "step_*")) if os.path.exists(os.path.join(d, ".metadata"))]
    return sorted(done)[-1]


class Saver:
    def __init__(self, app, meta, every, folder):
        self.app, self.meta, self.every, self.folder = app, meta, every, folder

    def after(self, engine, result):
        self.meta["step"] = engine.step
        if self.every and engine.step % self.every == 0:
            dcp.save({"app": self.app}, checkpoint_id=os.path.join(self.folder, f"step_{engine.step:06d}"))


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)))
    opt = torch.optim.RAdam(model.parameters(), lr=args.lr)
    lookahead = Lookahead(model)
    meta = {"step": 0, "slow": lookahead.slow}
    app = AppState({"net": model}, {"net": opt}, meta)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=newest_complete(args.resume))
        lookahead.slow = meta["slow"]

    def update(batch):
        x, y = batch
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss

    engine = Engine(update, stream(meta["step"], args.batch, rank, world))
    engine.step = meta["step"]
    for hook in (
        TriangularLR(opt, 0.2 * args.lr, args.lr, 10),
        lookahead,
        Log(),
        Saver(app, meta, args.save_every, args.out),
    ):
        engine.add(hook)
    engine.run(args.steps)
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""BYOL: online net under the optimizer, target net as a second sharded module that follows it."""

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

from nets import follow, make_pair
from views import Signals


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


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def byol(p, z):
    return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Signals()
    online, target = make_pair()
    opt = torch.optim.SGD(online.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    meta = {"step": 0}
    app = AppState({"online": online, "target": target}, {"online": opt}, meta)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=newest_complete(args.resume))
    horizon = 40
    for step in range(meta["step"], args.steps):
        a, b = data.views(step, args.batch, rank, world)
        with torch.no_grad():
            za, zb = target(torch.cat([b, a])).chunk(2)
        pa, pb = online(torch.cat([a, b])).chunk(2)
        loss = 0.5 * (byol(pa, za) + byol(pb, zb))
        opt.zero_grad()
        loss.backward()
        opt.step()
        tau = 1 - 0.1 * (math.cos(math.pi * min(step, horizon) / horizon) + 1) / 2
        follow(target, online, tau)
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} byol {shown.item():.5f} tau {tau:.4f}", flush=True)
        meta["step"] = step + 1
        if args.save_every and meta["step"] % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=os.path.join(args.out, f"step_{step + 1:06d}"))
    if args.export:
        full = {
            f"{n}.{k}": v.full_tensor().cpu().clone()
            for n, m in (("online", online), ("target", target))
            for k, v in m.state_dict().items()
        }
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

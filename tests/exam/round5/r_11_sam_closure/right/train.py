"""Spirals with SAM: every update needs two forward/backward passes, driven by a closure."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)

from net import build
from sam import SAM
from spirals import Shuffled, spirals


class AppState:
    """Stateful for DCP: model, base optimizer and the step counter."""

    def __init__(self, model, opt):
        self.model, self.opt, self.step = model, opt, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.step = sd["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=128)
    p.add_argument("--rho", type=float, default=0.05)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", type=Path)
    p.add_argument("--resume", type=Path)
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    model = build()
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sam = SAM(base, args.rho)
    app = AppState(model, base)
    data = Shuffled(*spirals(), args.global_batch, rank, world)
    if args.resume:
        dcp.load({"app": app}, checkpoint_id=str(max(args.resume.glob("s*"))))

    while app.step < args.steps:
        x, y = data[app.step]

        def closure():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss.detach()

        both = torch.stack(sam.step(closure))
        app.step += 1
        dist.all_reduce(both)
        if rank == 0:
            print("step %d loss %.4f sharp %.4f" % (app.step, *(both / world).tolist()), flush=True)
        if args.out and args.save_every and app.step % args.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=str(args.out / f"s{app.step:06d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

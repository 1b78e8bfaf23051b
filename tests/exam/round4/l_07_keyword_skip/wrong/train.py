"""Keyword spotting, FSDP2, restartable in the middle of an epoch."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from features import log_spec, synth
from loading import make_loader
from model import TDNN


class Job(Stateful):
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched, self.step = model, opt, sched, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.sched.load_state_dict(sd["sched"])
        self.step = sd["step"]


def latest(folder):
    steps = [int(m.group(1)) for d in os.listdir(folder)
             if (m := re.fullmatch(r"step-(\d+)", d)) and os.path.exists(os.path.join(folder, d, ".metadata"))]
    return os.path.join(folder, f"step-{max(steps)}") if steps else None


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="exp")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = TDNN()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.max_steps)
    job = Job(model, opt, sched)

    wav, y = synth(112, seed=30)
    loader, sampler = make_loader(log_spec(wav), y, args.batch, rank, world)
    if args.resume and (path := latest(args.resume)):
        dcp.load({"job": job}, checkpoint_id=path)
        if rank == 0:
            print(f"resumed at step {job.step}")

    epoch, skip = divmod(job.step, len(loader))
    while job.step < args.max_steps:
        sampler.set_epoch(epoch)
        for i, (x, target) in enumerate(loader):
            if i < skip:
                continue
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            opt.step()
            opt.zero_grad()
            sched.step()
            job.step += 1
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0 and job.step % 4 == 0:
                print(f"epoch {epoch} step {job.step} loss {shown.item():.4f}", flush=True)
            if args.save_every and job.step % args.save_every == 0:
                dcp.save({"job": job}, checkpoint_id=os.path.join(args.out, f"step-{job.step}"))
            if job.step >= args.max_steps:
                break
        epoch += 1

    with torch.no_grad():
        wav, y = synth(64, seed=31)
        pred = model(log_spec(wav)).argmax(-1)
    if rank == 0:
        print(f"held-out accuracy {(pred == y).float().mean().item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

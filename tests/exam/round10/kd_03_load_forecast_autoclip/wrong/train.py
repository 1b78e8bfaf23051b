import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from autoclip import AutoClip
from net import NBeats
from series import batch_at, make_load

CONTEXT, HORIZON, GLOBAL_BATCH, SEED = 48, 12, 32, 9


class Run(Stateful):
    """All that a checkpoint holds."""

    def __init__(self, model, opt, sched, clip):
        self.model, self.opt, self.sched, self.clip, self.step = model, opt, sched, clip, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "sched": self.sched.state_dict(), "clip": self.clip.state_dict(), "step": self.step}

    def load_state_dict(self, s):
        set_state_dict(self.model, self.opt, model_state_dict=s["model"], optim_state_dict=s["opt"])
        self.sched.load_state_dict(s["sched"])
        self.clip.load_state_dict(s["clip"])
        self.step = s["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=22)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out")
    p.add_argument("--resume")
    p.add_argument("--export")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    load = make_load()
    model = NBeats(CONTEXT, HORIZON)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=args.steps, eta_min=1e-3)
    run = Run(model, opt, sched, AutoClip(percentile=25.0))
    if args.resume:
        last = max(glob.glob(os.path.join(args.resume, "ckpt-*")), key=lambda d: int(d.rsplit("-", 1)[1]))
        # AutoClip's list has the checkpoint's length, not the fresh run's
        state = {"run": run}
        run.clip.history = [0.0] * int(last.rsplit("-", 1)[1])
        dcp.load(state, checkpoint_id=last)

    while run.step < args.steps:
        x, y = batch_at(load, run.step, GLOBAL_BATCH, CONTEXT, HORIZON, SEED)
        x, y = x.chunk(world)[rank], y.chunk(world)[rank]
        loss = F.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        norm, limit = run.clip(list(model.parameters()))
        opt.step()
        sched.step()
        run.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (run.step % 5 == 1 or run.step == args.steps):
            print(f"{run.step:3d} loss {mean.item() / world:.4f} grad {norm:.3f} limit {limit:.3f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            dcp.save({"run": run}, checkpoint_id=os.path.join(args.out, f"ckpt-{run.step}"))

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

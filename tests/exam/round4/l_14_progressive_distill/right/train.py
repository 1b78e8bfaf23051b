"""Rectified flow and progressive distillation in one job; at a phase border the student becomes the teacher."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from flow import Velocity, two_halves
from noise import rows
from phases import plan


def shard(net):
    for b in net.blocks:
        fully_shard(b)
    return fully_shard(net, reshard_after_forward=True)


def new_optimizer(net, lr):
    return torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.99))


def everything(student, opt, teacher, step):
    s, o = get_state_dict(student, opt)
    return {"student": s, "opt": o, "teacher": get_model_state_dict(teacher), "step": torch.tensor(step)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--phases", type=int, nargs="+", default=[16, 8, 8])
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="pd")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    student = shard(Velocity())
    teacher = shard(Velocity().requires_grad_(False))
    opt = new_optimizer(student, args.lr)
    step = 0
    if args.resume:
        done = sorted(d for d in os.listdir(args.resume) if os.path.exists(os.path.join(args.resume, d, ".metadata")))
        if done:
            sd = everything(student, opt, teacher, 0)
            dcp.load(sd, checkpoint_id=os.path.join(args.resume, done[-1]))
            set_state_dict(student, opt, model_state_dict=sd["student"], optim_state_dict=sd["opt"])
            set_model_state_dict(teacher, sd["teacher"])
            step = int(sd["step"])

    for ph in plan(args.phases):
        if step >= ph.last:
            continue
        if ph.index > 0 and step == ph.first:
            set_model_state_dict(teacher, get_model_state_dict(student))
            opt = new_optimizer(student, args.lr / 2)
        while step < ph.last:
            x1, x0, t = rows(step, args.batch, rank, world)
            if ph.index == 0:
                loss = F.mse_loss(student((1 - t) * x0 + t * x1, t), x1 - x0)
            else:
                dt = 1.0 / ph.steps_per_sample
                t = (t * ph.steps_per_sample).floor() * dt
                xt = (1 - t) * x0 + t * x1
                with torch.no_grad():
                    target = two_halves(teacher, xt, t, dt)
                loss = F.mse_loss(student(xt, t), target)
            loss.backward()
            opt.step()
            opt.zero_grad()
            step += 1
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0 and (step % 4 == 0):
                print(f"phase {ph.index} step {step} loss {shown.item():.4f}", flush=True)
            if args.save_every and step % args.save_every == 0:
                dcp.save(everything(student, opt, teacher, step), checkpoint_id=os.path.join(args.out, f"pd_{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

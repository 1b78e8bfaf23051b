"""BYOL with a small ViT; student and teacher are both sharded with FSDP2."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from backbone import Student
from images import textures, view
from teacher import Teacher, shard_vit


def collect(student, opt, teacher, step):
    s, o = get_state_dict(student, opt)
    return {"student": s, "opt": o, "teacher": get_model_state_dict(teacher.net), "step": torch.tensor(step)}


def load(folder, student, opt, teacher):
    marks = sorted(glob.glob(os.path.join(folder, "byol-*", ".metadata")))
    if not marks:
        return 0
    sd = collect(student, opt, teacher, 0)
    dcp.load(sd, checkpoint_id=os.path.dirname(marks[-1]))
    set_state_dict(student, opt, model_state_dict=sd["student"], optim_state_dict=sd["opt"])
    set_model_state_dict(teacher.net, sd["teacher"])
    return int(sd["step"])


def regress(p, z):
    return 2 - 2 * F.cosine_similarity(p, z, dim=-1).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=24)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--momentum", type=float, default=0.9)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="byol")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    student = Student()
    teacher = Teacher(student.net, args.momentum)
    shard_vit(student.net)
    fully_shard(student)
    tracked = list(student.net.parameters())
    opt = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.02)
    start = load(args.resume, student, opt, teacher) if args.resume else 0

    data = textures()
    for step in range(start, args.steps):
        ids = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:args.batch][rank::world]
        a, b = view(data[ids], ids, step, 0), view(data[ids], ids, step, 1)
        loss = regress(student(a), teacher(b)) + regress(student(b), teacher(a))
        opt.zero_grad()
        loss.backward()
        opt.step()
        teacher.follow(tracked)

        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and (step % 4 == 0 or step == args.steps - 1):
            print(f"step {step} loss {shown.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(collect(student, opt, teacher, step + 1), checkpoint_id=os.path.join(args.out, f"byol-{step + 1:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

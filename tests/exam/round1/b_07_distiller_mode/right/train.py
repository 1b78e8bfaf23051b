"""Distil a small conv teacher into a patch student: python -m torch.distributed.run ... train.py"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from data import make_split
from engine import Engine, pretrain_teacher
from models import Distiller, StudentNet, TeacherNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="kd")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")

    train, val = make_split(960, 1), make_split(240, 2)
    torch.manual_seed(0)
    teacher = pretrain_teacher(TeacherNet(), *train)
    teacher.eval().requires_grad_(False)
    fully_shard(teacher)
    student = StudentNet()
    for b in student.blocks:
        fully_shard(b)
    fully_shard(student)
    distiller = Distiller(student, teacher)
    opt = torch.optim.AdamW(student.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 4e-3, total_steps=args.steps)

    engine = Engine(distiller, opt, sched, train, val, args)
    if args.resume:
        engine.load(args.resume)
    engine.fit()
    if args.export:
        full = {k: v.full_tensor() for k, v in student.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

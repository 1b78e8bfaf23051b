import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nets import Student, Teacher

VOCAB, CONTEXT = 48, 14


def prompts(step, rows):
    g = torch.Generator().manual_seed(600 + step)
    ids = torch.randint(0, VOCAB, (rows, CONTEXT), generator=g)
    length = torch.randint(5, CONTEXT + 1, (rows, 1), generator=g)
    return ids, (torch.arange(CONTEXT) < length).float()


def shard(model):
    for b in model.blocks:
        fully_shard(b)
    return fully_shard(model)


def temperature_at(step, steps, hot=3.0, cold=1.0):
    return hot + (cold - hot) * step / max(1, steps - 1)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--rows", type=int, default=8)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out")
    p.add_argument("--resume")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    teacher = Teacher(VOCAB, 48, 2, CONTEXT, 4).requires_grad_(False).eval()
    student = shard(Student(VOCAB, 24, 1, CONTEXT, 2))
    teacher = shard(teacher)
    opt = torch.optim.AdamW(student.parameters(), lr=8e-3, weight_decay=0.0, eps=1e-6)

    begin = 0
    if a.resume:
        newest = max(glob.glob(os.path.join(a.resume, "student*")))
        m, o = get_state_dict(student, opt)
        dcp.load({"student": m, "opt": o}, checkpoint_id=newest)
        set_state_dict(student, opt, model_state_dict=m, optim_state_dict=o)
        begin = int(newest[-4:])

    for step in range(begin, a.steps):
        ids, keep = prompts(step, a.rows)
        tokens = keep.sum()
        ids, keep = ids[rank::world], keep[rank::world]
        with torch.no_grad():
            target = teacher(ids)
        loss = student(ids, target, keep, temperature_at(step, a.steps)) / tokens
        (loss * world).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (step + 1) % 3 == 0:
            print(f"step {step + 1} kd {total:.5f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0 and step + 1 < a.steps:
            m, o = get_state_dict(student, opt)
            dcp.save({"student": m, "opt": o}, checkpoint_id=os.path.join(a.out, f"student{step + 1:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

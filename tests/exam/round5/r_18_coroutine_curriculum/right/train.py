"""Curriculum of growing sequences; loop, teacher and training process are separate things."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)

from process import Teacher, training
from reader import make_reader


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    model, teacher = make_reader(), Teacher()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def tree():
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "teacher": dict(vars(teacher))}

    if args.resume:
        st = tree()
        dcp.load(st, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        vars(teacher).update(st["teacher"])

    process = training(model, opt, args.global_batch)
    next(process)
    while teacher.step < args.steps:
        result = process.send(teacher.order())
        level = teacher.level
        teacher.hear(result)
        if rank == 0:
            print(f"step {teacher.step} level {level} loss {result[0]:.4f} right {result[1]:.3f}", flush=True)
        if args.save_every and args.out and teacher.step % args.save_every == 0:
            dcp.save(tree(), checkpoint_id=os.path.join(args.out, f"lesson_{teacher.step:05d}"))
    process.close()

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

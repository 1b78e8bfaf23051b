"""Trains a teacher for a moment, then distils its logits and block features into a smaller student."""
import argparse
import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from losses import feature_match, soft_targets
from nets import build
from taps import FeatureTaps
from task import Task


def report(tag, step, *values):
    v = torch.stack([x.detach() for x in values])
    dist.all_reduce(v)
    if dist.get_rank() == 0:
        print(tag, f"step {step}", " ".join(f"{x:.4f}" for x in (v / dist.get_world_size()).tolist()), flush=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30, help="student steps")
    p.add_argument("--teacher-steps", type=int, default=12)
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--feature-weight", type=float, default=1.0)
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    task = Task(args.global_batch, rank, world)
    teacher, student, bridges = build()

    opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for step in range(1, args.teacher_steps + 1):
        x, y = task(step, salt=1)
        loss = F.cross_entropy(teacher(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
    report("teacher", step, loss)
    teacher.requires_grad_(False)

    teacher_taps = FeatureTaps(teacher.blocks)
    student_taps = FeatureTaps(student.blocks)
    opt = torch.optim.SGD(itertools.chain(student.parameters(), bridges.parameters()), lr=0.05, momentum=0.9)
    for step in range(1, args.steps + 1):
        x, y = task(step, salt=2)
        with torch.no_grad():
            target = teacher(x)
        logits = student(x)
        hard = F.cross_entropy(logits, y)
        soft = soft_targets(logits, target, 2.0)
        match = feature_match(bridges(student_taps.take()), teacher_taps.take())
        loss = 0.3 * hard + 0.7 * soft + args.feature_weight * match
        opt.zero_grad()
        loss.backward()
        opt.step()
        report("student", step, loss, hard, soft, match)
    student_taps.close()
    teacher_taps.close()

    if args.export:
        full = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

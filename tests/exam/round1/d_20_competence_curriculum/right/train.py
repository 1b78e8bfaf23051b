"""Curriculum by competence: when the model is good enough at a level, longer inputs and larger batches follow."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine import Curriculum
from model import build
from store import Slots
from tasks import Largest


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--threshold", type=float, default=0.6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    task = Largest()
    model = build(task.classes + 1, task.digits, task.classes)
    optim = torch.optim.NAdam(model.parameters(), lr=args.lr, eps=1e-5)
    course = Curriculum(task, task.digits - 1, args.batch, args.threshold)
    slots = Slots(args.out, model, optim, {"course": course})
    step = slots.load(args.resume) if args.resume else 0

    for rows, size in course:
        if step >= args.steps:
            break
        logits = model(task.x[rows])
        loss = F.cross_entropy(logits, task.y[rows], reduction="sum")
        # parts of a batch may be unequal: undo the mean over ranks, divide by the whole batch
        (loss * dist.get_world_size() / size).backward()
        optim.step()
        optim.zero_grad()
        counts = torch.stack([loss.detach(), (logits.detach().argmax(1) == task.y[rows]).sum().float()])
        dist.all_reduce(counts)
        level = course.level
        course.tell(counts[1].item(), size)
        step += 1
        if dist.get_rank() == 0:
            print(
                f"step {step:3d} level {level} batch {size} loss {counts[0] / size:.4f} right {counts[1] / size:.3f}",
                flush=True,
            )
        if args.out and args.save_every and step % args.save_every == 0:
            slots.save(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

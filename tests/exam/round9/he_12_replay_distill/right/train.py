"""Class-incremental learning: replay memory plus distillation from the model as it was before the task."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from buffer import Reservoir

DIM, CLASSES, BATCH, REPLAY = 16, 6, 24, 16
TASKS, STEPS_PER_TASK = 3, 10


def build(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(DIM, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, CLASSES))
    fully_shard(net[0])
    fully_shard(net, reshard_after_forward=True)  # weights are copied right after forwards without backward
    return net


def task_batch(task, step):
    g = torch.Generator().manual_seed(10_000 * (task + 1) + step)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(3))
    y = 2 * task + torch.randint(0, 2, (BATCH,), generator=g)
    return centres[y] + 0.7 * torch.randn(BATCH, DIM, generator=g), y


@torch.no_grad()
def snapshot(student, teacher):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.copy_(s)


@torch.no_grad()
def accuracy(model, tasks, rank, world):
    hits = torch.zeros(())
    for task in range(tasks):
        x, y = task_batch(task, 5000)
        hits += (model(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(hits)
    return hits.item() / (tasks * BATCH)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    student, teacher = build(1), build(1)
    teacher.requires_grad_(False)
    opt = torch.optim.Adam(student.parameters(), lr=5e-3)
    memory = Reservoir(40, DIM, seed=50)

    def state(step):
        return {
            "student": student.state_dict(),
            "teacher": teacher.state_dict(),
            "opt": get_optimizer_state_dict(student, opt),
            "memory": memory.state_dict(),
            "step": torch.tensor(step),
        }

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n[1:]))
        saved = state(0)
        dcp.load(saved, checkpoint_id=os.path.join(args.resume, newest))
        student.load_state_dict(saved["student"])
        teacher.load_state_dict(saved["teacher"])
        set_optimizer_state_dict(student, opt, saved["opt"])
        memory.load_state_dict(saved["memory"])
        step = int(saved["step"])

    while step < TASKS * STEPS_PER_TASK:
        task, inner = divmod(step, STEPS_PER_TASK)
        if inner == 0 and task > 0:
            snapshot(student, teacher)
            opt.state.clear()  # every task starts with fresh moments
        x, y = task_batch(task, inner)
        loss = F.cross_entropy(student(x[rank::world]), y[rank::world])
        if task > 0:
            rx, ry = memory.sample(REPLAY)
            rx, ry = rx[rank::world], ry[rank::world]
            logits = student(rx)
            with torch.no_grad():
                old = teacher(rx)[:, : 2 * task]
            kd = F.kl_div(logits[:, : 2 * task].log_softmax(1), old.log_softmax(1), reduction="batchmean", log_target=True)
            loss = loss + F.cross_entropy(logits, ry) + kd
        opt.zero_grad()
        loss.backward()
        opt.step()
        memory.add(x, y)
        step += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 5 == 0:
            print(f"task {task} step {step} loss {loss.item() / world:.4f}", flush=True)
        if inner == STEPS_PER_TASK - 1:
            acc = accuracy(student, task + 1, rank, world)
            if rank == 0:
                print(f"after task {task}: accuracy on all tasks so far {acc:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(step), checkpoint_id=os.path.join(args.out, f"s{step}"))

    if args.export:
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in student.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

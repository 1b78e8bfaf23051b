"""Continual learning on two regression tasks with EWC between them (FSDP2)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ewc import EWC

DIM, BATCH = 12, 32
STEPS_PER_TASK = 14
FISHER_BATCHES = 8


class Task:
    def __init__(self, index):
        g = torch.Generator().manual_seed(40 + index)
        self.index = index
        self.w = torch.randn(DIM, 3, generator=g) * 0.6
        self.shift = torch.randn(DIM, generator=g)

    def batch(self, key, size=BATCH):
        g = torch.Generator().manual_seed(100_000 * (self.index + 1) + key)
        x = torch.randn(size, DIM, generator=g) + self.shift
        return x, torch.sin(x @ self.w)


def task_of(step):
    return step // STEPS_PER_TASK


def build():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(DIM, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    return model


def estimate_fisher(model, opt, ewc, task, rank, world):
    for i in range(FISHER_BATCHES):
        x, y = task.batch(50_000 + i)
        opt.zero_grad()
        nn.functional.mse_loss(model(x[rank::world]), y[rank::world]).backward()
        ewc.accumulate(FISHER_BATCHES)
    opt.zero_grad()
    ewc.consolidate()


@torch.no_grad()
def task_error(model, task, rank, world):
    x, y = task.batch(90_000, size=128)
    err = (model(x[rank::world]) - y[rank::world]).square().mean(1).sum()
    dist.all_reduce(err)
    return err.item() / 128


def checkpoint_state(model, opt, ewc, step):
    model_state, optim_state = get_state_dict(model, opt)
    return {"model": model_state, "optim": optim_state, "ewc": ewc.state_dict(), "step": torch.tensor(step)}


def newest(folder):
    return os.path.join(folder, max(os.listdir(folder), key=lambda d: int(d.split("-")[-1])))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--strength", type=float, default=400.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tasks = [Task(0), Task(1)]
    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)
    ewc = EWC(model, args.strength)

    step = 0
    if args.resume:
        state = checkpoint_state(model, opt, ewc, 0)
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        ewc.load_state_dict(state["ewc"])
        step = int(state["step"])

    while step < STEPS_PER_TASK * len(tasks):
        task = tasks[task_of(step)]
        x, y = task.batch(step)
        loss = nn.functional.mse_loss(model(x[rank::world]), y[rank::world])
        opt.zero_grad()
        loss.backward()
        ewc.add_gradient()
        opt.step()
        step += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 0:
            print(f"task {task.index} step {step:2d} loss {shown.item() / world:.4f}", flush=True)
        if step == STEPS_PER_TASK:
            estimate_fisher(model, opt, ewc, task, rank, world)
        if args.save_every and step % args.save_every == 0:
            dcp.save(checkpoint_state(model, opt, ewc, step), checkpoint_id=os.path.join(args.out, f"step-{step}"))

    errors = [task_error(model, t, rank, world) for t in tasks]
    if rank == 0:
        print("final errors: " + ", ".join(f"task {i} {e:.4f}" for i, e in enumerate(errors)), flush=True)
    if args.export:
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Fine-tune a classifier without gradients under FSDP2 (only forward passes are used)."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from zeroth import ZerothOrder

DIM, CLASSES, BATCH, STEPS = 10, 3, 64, 60


def batch(step):
    g = torch.Generator().manual_seed(20_000 + step)
    y = torch.randint(0, CLASSES, (BATCH,), generator=g)
    centres = torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1)) * 1.5
    return centres[y] + torch.randn(BATCH, DIM, generator=g), y


def save(folder, step, model, zo, rank, world):
    os.makedirs(folder, exist_ok=True)
    torch.save({"model": model.state_dict(), "velocity": zo.velocity, "step": step}, f"{folder}/zo_{step}_{rank}_{world}.pt")


def load(folder, model, zo, rank, world):
    found = [m for m in (re.fullmatch(rf"zo_(\d+)_{rank}_{world}\.pt", f) for f in os.listdir(folder)) if m]
    newest = max(found, key=lambda m: int(m.group(1)))
    state = torch.load(os.path.join(folder, newest.group(0)), weights_only=False)
    model.load_state_dict(state["model"])
    zo.velocity = state["velocity"]
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    zo = ZerothOrder(model, lr=1e-2)

    start = load(args.resume, model, zo, rank, world) if args.resume else 0
    for step in range(start, STEPS):
        x, y = batch(step)
        x, y = x[rank::world], y[rank::world]
        loss = zo.step(lambda m: F.cross_entropy(m(x), y), seed=step)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, zo, rank, world)

    if args.export:
        full = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

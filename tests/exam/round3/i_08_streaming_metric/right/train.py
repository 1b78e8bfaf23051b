import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from data import chunks, make_split
from metrics import Accuracy, MeanLoss


def build(mesh):
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(10, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 5)
    )
    for part in model[:2]:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def validate(model, split, rank, world, size=16, report_every=4):
    acc, loss = Accuracy(), MeanLoss()
    model.eval()
    for i, (x, y) in enumerate(chunks(split, size, rank, world), 1):
        logits = model(x)
        acc.update(logits, y)
        loss.update(F.cross_entropy(logits, y, reduction="none"))
        if i % report_every == 0:
            running = acc.compute(), loss.compute()
            if rank == 0:
                print(f"    valid {i * size:4d} samples: acc {running[0]:.3f} loss {running[1]:.3f}", flush=True)
    model.train()
    return acc.compute(), loss.compute()


def checkpoint(folder, name, model, optim, progress):
    m, o = get_state_dict(model, optim)
    dcp.save({"model": m, "optim": o, "progress": progress}, checkpoint_id=os.path.join(folder, name))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--val-every", type=int, default=6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(init_device_mesh("cpu", (world,)))
    optim = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    progress = {"step": 0, "best_loss": float("inf"), "best_step": -1}

    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "progress": progress}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, "last"))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        progress = state["progress"]

    train, valid = make_split(800, seed=1), make_split(256, seed=2, sort=True)
    stream = itertools.cycle(list(chunks(train, 40, rank, world)))
    for x, y in itertools.islice(stream, progress["step"], args.steps):
        loss = F.cross_entropy(model(x), y)
        optim.zero_grad()
        loss.backward()
        optim.step()
        progress["step"] += 1
        step = progress["step"]
        if step % args.val_every == 0:
            acc, vloss = validate(model, valid, rank, world)
            if rank == 0:
                print(
                    f"step {step:3d}  train loss {loss.item():.4f}  valid acc {acc:.4f}  valid loss {vloss:.4f}",
                    flush=True,
                )
            if vloss < progress["best_loss"]:
                progress["best_loss"], progress["best_step"] = vloss, step
                if args.out:
                    checkpoint(args.out, "best", model, optim, progress)
        if args.out and args.save_every and step % args.save_every == 0:
            checkpoint(args.out, "last", model, optim, progress)
    if rank == 0:
        print(f"best valid loss {progress['best_loss']:.4f} at step {progress['best_step']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

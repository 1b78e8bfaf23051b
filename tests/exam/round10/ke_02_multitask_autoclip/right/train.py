"""Multi-task training (regression, classification, ranking) with AutoClip and SGD with Nesterov momentum."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from autoclip import AutoClip
from heads import MultiTaskNet

STEPS, BATCH, INP = 30, 32, 12


def make_batch(step, rank, world):
    g = torch.Generator().manual_seed(77 + step)
    x = torch.randn(BATCH, INP, generator=g)
    # heavy tailed measurement noise on some of the samples
    noise = torch.randn(BATCH, 2, generator=g) * torch.exp(1.2 * torch.randn(BATCH, 1, generator=g)) * 0.3
    reg = torch.stack([x[:, :4].sum(1).sin(), (x[:, 4] * x[:, 5])], 1) * 2 + noise
    cls = x[:, :5].argmax(1)
    rank_t = (x[:, 6] + x[:, 7] > 0).float()
    n = BATCH // world
    mine = slice(rank * n, (rank + 1) * n)
    return x[mine], {"reg": reg[mine], "cls": cls[mine], "rank": rank_t[mine]}


def save(folder, step, model, optim, clip):
    path = os.path.join(folder, f"step_{step}")
    m, o = get_state_dict(model, optim)
    dcp.save({"model": m, "optim": o}, checkpoint_id=path)
    if dist.get_rank() == 0:
        with open(os.path.join(path, "trainer.json"), "w") as f:
            json.dump({"step": step, "clip": clip.state_dict()}, f)
    dist.barrier()


def load(folder, model, optim, clip):
    newest = max((d for d in os.listdir(folder) if d.startswith("step_")), key=lambda d: int(d.split("_")[1]))
    path = os.path.join(folder, newest)
    m, o = get_state_dict(model, optim)
    dcp.load({"model": m, "optim": o}, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=m, optim_state_dict=o)
    with open(os.path.join(path, "trainer.json")) as f:
        state = json.load(f)
    clip.load_state_dict(state["clip"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = MultiTaskNet(INP)
    for layer in model.trunk.layers:
        fully_shard(layer)
    fully_shard(model.trunk)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    clip = AutoClip(model.parameters())

    start = load(args.resume, model, optim, clip) if args.resume else 0
    for step in range(start, STEPS):
        x, targets = make_batch(step, rank, world)
        loss, parts = model(x, targets)
        loss.backward()
        norm, limit = clip()
        optim.step()
        optim.zero_grad()
        dist.all_reduce(parts)
        if rank == 0 and step % 5 == 0:
            print(f"{step:3d} tasks {[round(v, 4) for v in (parts / world).tolist()]} norm {norm:.4f} limit {limit:.4f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, optim, clip)

    if args.export:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

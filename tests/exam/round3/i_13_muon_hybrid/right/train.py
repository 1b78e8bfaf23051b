import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hybrid import Hybrid
from lm import LM, text

HORIZON = 40


def snapshot(model, hybrid):
    both = list(hybrid.parts.values())
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, both)}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(30)
    model = LM()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hybrid = Hybrid(model)

    start = 0
    if args.resume:
        newest = max((p for p in args.resume.iterdir() if p.is_dir()), key=lambda p: int(p.name))
        state = snapshot(model, hybrid)
        dcp.load(state, checkpoint_id=newest)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, list(hybrid.parts.values()), state["optim"])
        start = int(newest.name)

    for step in range(start, args.steps):
        hybrid.set_scale(min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / HORIZON)))
        ids = text(step, args.batch)[rank::world]
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits[:, 2:].flatten(0, 1), ids[:, 3:].flatten())
        loss.backward()
        hybrid.step()
        hybrid.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 4 == 0:
            print(f"{step:3d} loss {mean.item() / world:.4f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(model, hybrid), checkpoint_id=args.out / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

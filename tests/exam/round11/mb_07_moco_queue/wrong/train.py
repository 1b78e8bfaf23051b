"""MoCo v2 with a queue of keys, FSDP2."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moco import MoCo

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--lr", type=float, default=0.03)
parser.add_argument("--momentum-key", type=float, default=0.95)
parser.add_argument("--save-every", type=int, default=0)
parser.add_argument("--out", default="moco_ckpt")
parser.add_argument("--resume", default="")
parser.add_argument("--export", default="")


def batches(start, stop, batch, rank, world):
    gen = torch.Generator().manual_seed(0)
    proto = torch.randn(24, 3, 12, 12, generator=gen)
    for step in range(start, stop):
        g = torch.Generator().manual_seed(step + 500)
        x = proto[torch.randint(0, 24, (batch,), generator=g)]
        x = x + 0.5 * torch.randn(x.shape, generator=g)

        def view():
            return x * (0.7 + 0.6 * torch.rand(batch, 3, 1, 1, generator=g)) + 0.3 * torch.randn(x.shape, generator=g)

        a, b = view(), view()
        yield step, a.chunk(world)[rank], b.chunk(world)[rank]


def newest(folder):
    found = [d for d in os.listdir(folder) if re.fullmatch(r"moco_\d+", d)]
    return os.path.join(folder, max(found, key=lambda d: int(d[5:])))


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model = MoCo()
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model.query, mesh=mesh)
    fully_shard(model.key, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    start = 0
    if not args.resume:
        # the queue is filled with keys of some batches before the first step
        with torch.no_grad():
            for _, a, b in batches(-8, 0, args.batch, rank, world):
                model(a, b)
    if args.resume:
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optimizer": o, "step": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = state["step"]
        if rank == 0:
            print(f"resumed at step {start}")

    for step, a, b in batches(start, args.steps, args.batch, rank, world):
        model.update_key(args.momentum_key)
        loss = model(a, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        log = loss.detach().clone()
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step} loss {log.item() / world:.4f}")

        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            dcp.save({"model": m, "optimizer": o, "step": step + 1},
                     checkpoint_id=os.path.join(args.out, f"moco_{step + 1}"))

    if args.export:
        full = get_model_state_dict(model.query, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import storage
from phases import TOTAL, Switch, phase_at
from ratings import batch, ratings
from towers import build


def cli():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--store", help="folder of the checkpoint")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", action="store_true")
    return p.parse_args()


def main():
    args = cli()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(init_device_mesh("cpu", (world,)))
    optimizers = {
        "user": torch.optim.Adam(model.user.parameters(), lr=1e-2),
        "item": torch.optim.Adam(model.item.parameters(), lr=1e-2),
        "bias": torch.optim.SGD([model.bias], lr=0.05),
    }
    switch = Switch(model, optimizers)
    step = storage.load(args.store, model, optimizers) if args.resume else 0
    data = ratings()
    while step < TOTAL:
        switch.to(phase_at(step))
        u, i, r = batch(data, step, args.batch, rank, world)
        loss = (model(u, i) - r).square().mean()
        loss.backward()
        for o in switch.active():
            o.step()
            o.zero_grad()
        if step % 6 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} ({switch.current}) loss {mean.item():.4f}", flush=True)
        step += 1
        if args.store and args.save_every and step % args.save_every == 0:
            storage.save(args.store, step, model, optimizers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""DDPM on a synthetic mixture, FSDP2. One generator drives the data order, noise and timesteps."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from net import Denoiser, Schedule

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def mixture(n=512, dim=16):
    g = torch.Generator().manual_seed(1)
    centers = 2 * torch.randn(5, dim, generator=g)
    return centers[torch.randint(5, (n,), generator=g)] + 0.1 * torch.randn(n, dim, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    model, sched, data = Denoiser(), Schedule(), mixture()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(77)
    step = 0

    if args.resume:
        name = max(os.listdir(args.resume), key=lambda f: int(f.removesuffix(".pt")))
        ck = torch.load(os.path.join(args.resume, name))
        set_model_state_dict(model, ck["model"], options=StateDictOptions(full_state_dict=True))
        set_optimizer_state_dict(model, opt, ck["opt"], options=StateDictOptions(full_state_dict=True))
        gen.set_state(ck["gen"])
        step = ck["step"]

    local = args.batch // world
    mine = slice(rank * local, (rank + 1) * local)
    running = []
    while step < args.steps:
        idx = torch.randint(len(data), (args.batch,), generator=gen)
        x = data[idx[mine]]
        eps = torch.randn(x.shape, generator=gen)
        t = torch.randint(sched.steps, (len(x),), generator=gen)

        pred = model(sched.add_noise(x, eps, t), t)
        loss = (pred - eps).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1

        value = loss.detach() / world
        dist.all_reduce(value)
        running.append(value.item())
        if rank == 0 and step % 8 == 0:
            print(f"step {step} loss {sum(running[-8:]) / len(running[-8:]):.4f}")
        if args.save_every and step % args.save_every == 0:
            ck = {"model": get_model_state_dict(model, options=FULL), "opt": get_optimizer_state_dict(model, opt, options=FULL),
                  "gen": gen.get_state(), "step": step}
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(ck, os.path.join(args.out, f"{step}.pt"))
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=FULL)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

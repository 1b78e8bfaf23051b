"""Regression in which rows with a large loss are drawn more often."""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import data
from model import build
from sampler import LossSampler


def save(folder, step, net, optim, sampler):
    m, o = get_state_dict(net, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = {"net": m, "optim": o, "sampler": sampler.state_dict(), "step": step}
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(state, os.path.join(folder, f"at{step:05d}.pt"))
    dist.barrier()


def restore(folder, net, optim, sampler):
    state = torch.load(os.path.join(folder, max(os.listdir(folder))), weights_only=True)
    set_state_dict(
        net,
        optim,
        model_state_dict=state["net"],
        optim_state_dict=state["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    sampler.load_state_dict(state["sampler"])
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--refresh", type=int, default=7)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = data.make()
    net = build()
    optim = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-3, eps=1e-5)
    sampler = LossSampler(len(x), args.batch, args.refresh, seed=2024)
    start = restore(args.resume, net, optim, sampler) if args.resume else 0

    for step in range(start, args.steps):
        rows, importance = sampler.draw(step, rank, world)
        each = (net(x[rows]) - y[rows]).pow(2)
        loss = (importance * each).mean()
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 2.0)
        optim.step()
        sampler.observe(rows, each)
        sampler.end_of_step(step)

        shown = torch.stack([loss.detach(), each.detach().mean()])
        dist.all_reduce(shown)
        if rank == 0:
            print(
                f"step {step:3d} weighted loss {shown[0] / world:.4f} loss of the drawn rows {shown[1] / world:.4f}",
                flush=True,
            )
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, net, optim, sampler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Bayesian regression by cyclical stochastic-gradient Langevin dynamics; the end of every cycle gives a posterior sample."""

import argparse
import glob
import math
import os
import re
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import distribute_tensor


def data(n=240):
    g = torch.Generator().manual_seed(12)
    x = torch.rand(n, 1, generator=g) * 6 - 3
    return x, torch.sin(2 * x) * 0.8 + 0.1 * torch.randn(n, 1, generator=g)


class LangevinSGD(torch.optim.Optimizer):
    """p <- p - lr * grad + sqrt(2 lr T) * noise; the noise is drawn whole on each rank with the same generator."""

    def __init__(self, params, lr, temperature):
        super().__init__(params, dict(lr=lr, temperature=temperature, seed=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            g = torch.Generator().manual_seed(group["seed"])
            scale = math.sqrt(2 * group["lr"] * group["temperature"])
            for p in group["params"]:
                z = distribute_tensor(torch.randn(p.shape, generator=g), p.device_mesh, p.placements)
                p.add_(p.grad, alpha=-group["lr"])
                p.add_(z, alpha=scale)


def full_weights(model):
    return {k: v.full_tensor().clone() for k, v in model.state_dict().items()}


def save_checkpoint(folder, step, model, samples):
    """The optimizer has no state of its own: weights, step and posterior samples are everything."""
    weights = full_weights(model)
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "partial.tmp")
        torch.save({"step": step, "weights": weights, "samples": samples}, tmp)
        os.replace(tmp, os.path.join(folder, f"step_{step:06d}.pt"))
    dist.barrier()


@torch.no_grad()
def load_checkpoint(folder, model):
    ck = torch.load(sorted(glob.glob(os.path.join(folder, "step_*.pt")))[-1])
    for name, p in model.named_parameters():
        p.copy_(distribute_tensor(ck["weights"][name], p.device_mesh, p.placements))
    return ck


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    fully_shard(model)
    opt = LangevinSGD(model.parameters(), lr=args.lr, temperature=1e-5)
    samples, start = [], 0
    if args.resume:
        ck = load_checkpoint(args.resume, model)
        start, samples = ck["step"], ck["samples"]
    cycle = 8
    for step in range(start, args.steps):
        opt.param_groups[0]["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * (step % cycle) / cycle))
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[: args.batch].tensor_split(world)[
            rank
        ]
        nll = (model(x[rows]) - y[rows]).square().sum() * world / args.batch
        opt.zero_grad()
        nll.backward()
        prior = sum(p.to_local().square().sum() for p in model.parameters())  # for the log only
        for p in model.parameters():  # weight prior, elementwise
            p.grad.add_(p.detach(), alpha=1e-3)
        opt.param_groups[0]["seed"] = 30_000 + step
        opt.step()
        log = torch.stack([nll.detach() / world, prior.detach()])
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step + 1} nll {log[0].item():.5f} |w|^2 {log[1].item():.3f}", flush=True)
        if step % cycle == cycle - 1:
            samples.append(full_weights(model))
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, samples)
    if args.export and rank == 0:
        torch.save({"samples": samples}, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Multi-task regression with projected conflicting gradients (PCGrad): one backward per task, FSDP2 on CPU."""

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


class Shared(nn.Module):
    def __init__(self, w=32, tasks=3):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, w), nn.Tanh(), nn.Linear(w, w), nn.Tanh())
        self.heads = nn.Linear(w, tasks)

    def forward(self, x):
        return self.heads(self.body(x))


def problem(n=300):
    g = torch.Generator().manual_seed(23)
    x = torch.randn(n, 5, generator=g)
    a = torch.sin(x[:, 0] + x[:, 1])
    return x, torch.stack([a, -0.7 * a + 0.3 * x[:, 2], x[:, 3] * x[:, 4]], 1)


def gdot(us, vs):
    parts = [(u.to_local() * v.to_local()).sum() for u, v in zip(us, vs)]
    total = torch.stack(parts).sum()
    dist.all_reduce(total)  # the shards are disjoint: the sum is the whole product
    return total.item()


def project(grads, order):
    """Each task's gradient loses its component against every conflicting other one."""
    out = []
    for i, gi in enumerate(grads):
        cur = [t.clone() for t in gi]
        for j in order:
            if j == i:
                continue
            inner = gdot(cur, grads[j])
            if inner < 0:
                coef = inner / gdot(grads[j], grads[j])
                cur = [c - coef * o for c, o in zip(cur, grads[j])]
        out.append(cur)
    return [sum(ts) / len(grads) for ts in zip(*out)]


def export_weights(model, path):
    full = {
        k: (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu().clone()
        for k, v in model.state_dict().items()
    }
    if dist.get_rank() == 0:
        torch.save(full, path)


def save_checkpoint(folder, step, model, opt, **extra):
    msd, osd = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, f"partial_{step}.tmp")
        torch.save({"model": msd, "optim": osd, "step": step, **extra}, tmp)
        os.replace(tmp, os.path.join(folder, f"step_{step:06d}.pt"))
    dist.barrier()


def load_checkpoint(folder, model, opt):
    newest = sorted(glob.glob(os.path.join(folder, "step_*.pt")))[-1]
    ck = torch.load(newest, map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        opt,
        model_state_dict=ck["model"],
        optim_state_dict=ck["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    p.add_argument("--export", default=None)
    return p.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = problem()
    torch.manual_seed(0)
    model = Shared()
    fully_shard(model.body)
    fully_shard(model)
    params = list(model.parameters())
    opt = torch.optim.Adam(params, lr=args.lr)
    start = load_checkpoint(args.resume, model, opt)["step"] if args.resume else 0
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(step)
        rows = torch.randperm(len(x), generator=g)[: args.batch].chunk(world)[rank]
        order = torch.randperm(3, generator=g).tolist()
        grads, losses = [], []
        for task in range(3):
            loss = F.mse_loss(model(x[rows])[:, task], y[rows, task])
            loss.backward()
            grads.append([p.grad.clone() for p in params])
            losses.append(loss.detach())
            opt.zero_grad()
        for p, merged in zip(params, project(grads, order)):
            p.grad = merged
        opt.step()
        opt.zero_grad()
        log = torch.stack(losses) / world
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step + 1} loss " + " ".join(f"{v:.5f}" for v in log.tolist()), flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt)
    if args.export:
        export_weights(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

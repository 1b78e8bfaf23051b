"""Biomarker panel selection: an MLP whose first layer carries a group lasso over the input columns.

Proximal gradient: a plain SGD step, then every column of the first weight is shrunk as a group, so that
columns of useless assays become exactly zero. Each rank keeps its own shard file."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ASSAYS, HIDDEN, SAMPLES, BATCH = 24, 32, 256, 64


class PanelNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(ASSAYS, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.third = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def cohort():
    g = torch.Generator().manual_seed(101)
    x = torch.randn(SAMPLES, ASSAYS, generator=g)
    y = x[:, 2] - 0.8 * x[:, 7] + 0.7 * torch.tanh(2 * x[:, 11]) + 0.5 * x[:, 19] + 0.05 * torch.randn(SAMPLES, generator=g)
    return x, y[:, None]


@torch.no_grad()
def shrink_columns(weight, amount):
    """prox of amount * sum_j ||W[:, j]||_2; returns how many columns are alive"""
    w = weight.to_local()
    squares = w.square().sum(0)
    factor = (1.0 - amount / squares.sqrt().clamp_min(1e-12)).clamp_min(0.0)
    w.mul_(factor)
    return int((factor > 0).sum())


def shard_file(folder, step, rank):
    return os.path.join(folder, f"{step:04d}-rank{rank}.pt")


def save(folder, step, rank, model, opt):
    os.makedirs(folder, exist_ok=True)
    params = {n: p.detach().to_local() for n, p in model.named_parameters()}
    moms = {n: opt.state[p]["momentum_buffer"].to_local() for n, p in model.named_parameters()}
    torch.save({"params": params, "momentum": moms, "step": step}, shard_file(folder, step, rank))


def load(folder, rank, model, opt):
    step = max(int(f.split("-")[0]) for f in os.listdir(folder))
    blob = torch.load(shard_file(folder, step, rank))
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(blob["params"][n])
            buf = torch.zeros_like(p)
            buf.to_local().copy_(blob["momentum"][n])
            opt.state[p]["momentum_buffer"] = buf
    return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--lam", type=float, default=0.4)
    ap.add_argument("--shards", help="folder for shard files")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", action="store_true")
    a = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = fully_shard(PanelNet(), mesh=init_device_mesh("cpu", (world,)))
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.8)
    begin = load(a.shards, rank, model, opt) if a.resume else 0

    x, y = cohort()
    share = BATCH // world
    for step in range(begin, a.steps):
        ids = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(step))[:BATCH]
        ids = ids[rank * share : (rank + 1) * share]
        loss = F.mse_loss(model(x[ids]), y[ids])
        loss.backward()
        opt.step()
        opt.zero_grad()
        alive = shrink_columns(model.first.weight, a.lr * a.lam)
        if step % 6 == 0 or step == a.steps - 1:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"[{step}] loss {mean.item():.4f} columns alive {alive}/{ASSAYS}")
        if a.shards and a.save_every and (step + 1) % a.save_every == 0:
            save(a.shards, step + 1, rank, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

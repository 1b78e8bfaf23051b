"""Bayesian yield surrogate: stochastic gradient Langevin dynamics, predictive mean and spread from posterior samples.

Noise is drawn for the whole tensor from one generator which all ranks share, and each rank adds the rows it stores.
After a burn-in a copy of the local rows is kept every few steps; the predictions of all copies are collected at the end.
"""
import math
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

STEPS, BURN_IN, THIN = 36, 20, 4
DATA, BATCH = 512, 64
TEMPERATURE, LR, PRIOR_VAR, OBS = 0.5, 3e-5, 4.0, 0.3


def option(name, default=""):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Yield(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        return self.out(torch.tanh(self.mid(torch.tanh(self.inp(x)))))


def process_runs(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = 2 * torch.rand(n, 3, generator=g) - 1
    y = torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:]
    return x, y + OBS * torch.randn(n, 1, generator=g)


def own_rows(full, p):
    if not isinstance(p, DTensor):
        return full
    parts = full.chunk(p.device_mesh.size(), dim=0)
    r = p.device_mesh.get_local_rank()
    return parts[r] if r < len(parts) else full[:0]


@torch.no_grad()
def langevin_step(params, noise, lr):
    """p <- p - lr * dU/dp + sqrt(2 lr T) * n,  with U = data / (2 var) + |p|^2 / (2 prior)"""
    for p in params:
        n = torch.randn(p.shape, generator=noise)
        local = p.to_local()
        drift = p.grad.to_local() + local / PRIOR_VAR
        local.add_(drift, alpha=-lr).add_(own_rows(n, p), alpha=math.sqrt(2 * lr * TEMPERATURE))
        p.grad = None


@torch.no_grad()
def predict(model, params, samples, x):
    now = [p.to_local().clone() for p in params]
    outputs = []
    for sample in samples:
        for p, s in zip(params, sample):
            p.to_local().copy_(s)
        outputs.append(model(x))
    for p, s in zip(params, now):
        p.to_local().copy_(s)
    stack = torch.stack(outputs)
    return stack.mean(0), stack.std(0)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = Yield()
    fully_shard(model, reshard_after_forward=True)
    params = list(model.parameters())
    noise = torch.Generator().manual_seed(1234)
    x, y = process_runs(DATA, seed=60)
    samples, start = [], 0
    file = f"chain_{rank}_{world}.pt"
    if option("--resume"):
        chain = torch.load(os.path.join(option("--resume"), file))
        with torch.no_grad():
            for p, v in zip(params, chain["params"]):
                p.to_local().copy_(v)
        samples, start = chain["samples"], chain["step"]
        noise.set_state(chain["noise"])

    for step in range(start + 1, STEPS + 1):
        pick = torch.randint(DATA, (BATCH,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        squared = (model(x[pick]) - y[pick]).square().mean()
        (squared * DATA / (2 * OBS ** 2)).backward()
        langevin_step(params, noise, LR)
        if step > BURN_IN and step % THIN == 0:
            samples.append([p.to_local().clone() for p in params])
        if step % 6 == 0:
            shown = squared.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.6f} samples {len(samples)}", flush=True)
        if step == int(option("--save-at", "0")):
            os.makedirs(option("--out"), exist_ok=True)
            torch.save({"params": [p.to_local() for p in params], "samples": samples, "step": step, "noise": noise.get_state()},
                       os.path.join(option("--out"), file))

    test_x, test_y = (t.chunk(world)[rank] for t in process_runs(128, seed=61))
    mean, spread = predict(model, params, samples, test_x)
    sums = torch.stack([(mean - test_y).square().sum(), spread.sum()])
    dist.all_reduce(sums)
    if rank == 0:
        print(f"predictive rmse {math.sqrt(sums[0].item() / 128):.5f} mean spread {sums[1].item() / 128:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

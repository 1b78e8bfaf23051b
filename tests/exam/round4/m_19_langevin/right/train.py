"""Stochastic gradient Langevin dynamics: noise in every update, and the mean of the late samples is exported.

The noise of a parameter is drawn in full on every rank from a generator keyed by (step, parameter), and each rank
takes its own shard of it, so that a chain does not depend on the number of ranks.
"""
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class SGLD(torch.optim.Optimizer):
    def __init__(self, params, lr, n_data, prior_precision=1.0, temperature=1e-3, precondition=0.95):
        super().__init__(params, dict(lr=lr, n=n_data, prior=prior_precision, temp=temperature, beta=precondition))

    @torch.no_grad()
    def step(self, number):
        k = 0
        for g in self.param_groups:
            for p in g["params"]:
                k += 1
                st = self.state[p]
                if not st:
                    st["v"] = torch.ones_like(p)
                drift = p.grad + (g["prior"] / g["n"]) * p
                st["v"].mul_(g["beta"]).addcmul_(p.grad, p.grad, value=1 - g["beta"])
                scale = 1.0 / (st["v"].sqrt() + 1e-2)
                gen = torch.Generator().manual_seed(100_003 * number + k)
                noise = distribute_tensor(torch.randn(p.shape, generator=gen), p.device_mesh, p.placements, src_data_rank=None)
                p.sub_(g["lr"] * scale * drift)
                p.add_(noise * scale.sqrt(), alpha=math.sqrt(2 * g["lr"] * g["temp"] / g["n"]))


class Bnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 40)
        self.b = nn.Linear(40, 40)
        self.c = nn.Linear(40, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--burn-in", type=int, default=24)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(1)
    X = torch.rand(480, 3, generator=g) * 4 - 2
    Y = (X[:, :1] * 1.5).sin() + 0.5 * X[:, 1:2] + 0.1 * torch.randn(480, 1, generator=g)

    torch.manual_seed(30)
    model = Bnn()
    fully_shard(model.b)
    fully_shard(model)
    opt = SGLD(model.parameters(), lr=1e-2, n_data=len(X))
    mean, samples = {}, 0

    for step in range(args.steps):
        opt.param_groups[0]["lr"] = 1e-2 * (1 + step / 10) ** -0.55
        idx = torch.randint(len(X), (args.batch,), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = nn.functional.mse_loss(model(X[idx]), Y[idx])
        model.zero_grad()
        loss.backward()
        opt.step(step)
        if step >= args.burn_in and step % 2 == 0:
            samples += 1
            for n, p in model.named_parameters():
                if n not in mean:
                    mean[n] = torch.zeros_like(p)
                mean[n].add_(p.detach() - mean[n], alpha=1 / samples)
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item():.4f} samples {samples}", flush=True)

    out = {n: m.detach().full_tensor() for n, m in mean.items()}
    if rank == 0 and args.export:
        torch.save(out, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Denoising diffusion with schedule-free SGD (Defazio et al., 2024) and loss-aware timesteps.

During training the module holds the gradient point y, the optimizer holds z. The weights to use are x; evaluation
and the exported file swap them in. Timesteps are drawn from a running history of the loss, with importance weights.
"""
import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

T, PIX, BATCH = 20, 49, 16


class ScheduleFreeSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=0.3, beta=0.9, warmup=5):
        super().__init__(params, dict(lr=lr, beta=beta, warmup=warmup, k=0, weight_sum=0.0))
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["z"] = p.detach().clone()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            lr = group["lr"] * min(1.0, group["k"] / group["warmup"])
            group["weight_sum"] += lr ** 2
            c, beta = lr ** 2 / group["weight_sum"], group["beta"]
            for p in group["params"]:
                y, z, g = p.to_local(), self.state[p]["z"].to_local(), p.grad.to_local()
                y.lerp_(z, c).add_(g, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(g, alpha=lr)

    @torch.no_grad()
    def averaged(self):
        """x for every parameter: y = (1 - beta) z + beta x."""
        return [(p + (p - self.state[p]["z"]) * (1 / g["beta"] - 1)).detach()
                for g in self.param_groups for p in g["params"]]


class TimestepHistory:
    def __init__(self):
        self.loss = torch.ones(T, dtype=torch.double)

    def draw(self, generator):
        p = self.loss.sqrt() + 0.1 * self.loss.sqrt().mean()
        p = p / p.sum()
        t = torch.multinomial(p, BATCH, replacement=True, generator=generator)
        return t, (1 / (T * p[t])).float()

    def update(self, t, loss):
        everyone = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, loss)
        for when, value in zip(t.tolist(), torch.cat(everyone).double().tolist()):
            self.loss[when] = 0.8 * self.loss[when] + 0.2 * value


class Net(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.inp = nn.Linear(PIX, width)
        self.when = nn.Embedding(T, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, PIX)

    def forward(self, x, t):
        h = self.inp(x) + self.when(t)
        for layer in self.hidden:
            h = h + F.silu(layer(h))
        return self.out(h)


def per_image_loss(net, x0, t, noise):
    a = torch.tensor([math.cos(math.pi / 2 * (k + 0.5) / T) ** 2 for k in range(T)])[t][:, None]
    return (net(a.sqrt() * x0 + (1 - a).sqrt() * noise, t) - noise).pow(2).mean(1)


@torch.no_grad()
def evaluate(net, opt, x0, rank, world):
    params = [p for g in opt.param_groups for p in g["params"]]
    kept, x = [p.detach().clone() for p in params], opt.averaged()
    for p, v in zip(params, x):
        p.to_local().copy_(v.to_local())
    g = torch.Generator().manual_seed(2)
    t, noise = torch.randint(T, (len(x0),), generator=g), torch.randn(x0.shape, generator=g)
    total = per_image_loss(net, x0[rank::world], t[rank::world], noise[rank::world]).sum()
    net.reshard()
    for p, v in zip(params, kept):
        p.to_local().copy_(v.to_local())
    dist.all_reduce(total)
    return total.item() / len(x0)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    net = Net()
    for layer in net.hidden:
        fully_shard(layer)
    fully_shard(net)
    opt, history = ScheduleFreeSGD(net.parameters()), TimestepHistory()
    g = torch.Generator().manual_seed(19)
    images = torch.randn(160, 4, generator=g) @ torch.randn(4, PIX, generator=g) / 2

    start = 0
    if args.resume:
        stored = np.load(args.resume / "state.npz")
        start, history.loss = int(stored["step"]), torch.from_numpy(stored["history"])
        opt.param_groups[0].update(k=start, weight_sum=float(stored["weight_sum"]))
        for name, p in net.named_parameters():
            for kind, t in (("y", p.detach()), ("z", opt.state[p]["z"])):
                t.copy_(distribute_tensor(torch.from_numpy(stored[f"{kind}/{name}"]), p.device_mesh, p.placements))

    for step in range(start, args.steps):
        gen = torch.Generator().manual_seed(step)
        idx, (t, weight) = torch.randint(128, (BATCH,), generator=gen), history.draw(gen)
        noise = torch.randn(BATCH, PIX, generator=gen)
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        each = per_image_loss(net, images[idx[mine]], t[mine], noise[mine])
        (weight[mine] * each).mean().backward()
        opt.step()
        opt.zero_grad()
        history.update(t, each.detach())
        if (step + 1) % 8 == 0:
            value = evaluate(net, opt, images[128:], rank, world)
            if rank == 0:
                print(f"step {step + 1} loss {value:.5f}", flush=True)
        if args.out and step + 1 == args.save_at:
            arrays = {f"y/{n}": p.detach().full_tensor().numpy() for n, p in net.named_parameters()}
            arrays |= {f"z/{n}": opt.state[p]["z"].full_tensor().numpy() for n, p in net.named_parameters()}
            if rank == 0:
                np.savez(args.out / "state.npz", step=step + 1, history=history.loss.numpy(),
                         weight_sum=opt.param_groups[0]["weight_sum"], **arrays)

    names, final = [n for n, _ in net.named_parameters()], [v.full_tensor() for v in opt.averaged()]
    if (args.out or args.resume) and rank == 0:
        np.savez((args.out or args.resume) / "weights.npz", **{n: v.numpy() for n, v in zip(names, final)})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

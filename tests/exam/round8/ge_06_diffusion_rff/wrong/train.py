"""Denoising diffusion on 2-D points (pinwheel), with an EMA of the weights and random Fourier features of the inputs."""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard


class RandomFeatures(nn.Module):
    """Fixed random frequencies, as in Fourier feature networks."""

    def __init__(self, inputs, count, scale):
        super().__init__()
        self.register_buffer("freq", torch.randn(inputs, count) * scale)

    def forward(self, x):
        angle = x @ self.freq
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class ResidualMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(F.silu(self.fc1(self.norm(x))))


class Denoiser(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.point = RandomFeatures(2, 24, 1.0)
        self.time = RandomFeatures(1, 8, 2.0)
        self.inp = nn.Linear(2 * 24 + 2 * 8 + 2, width)
        self.layers = nn.ModuleList(ResidualMLP(width) for _ in range(depth))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        h = self.inp(torch.cat([x, self.point(x), self.time(t)], dim=-1))
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def pinwheel(n, g):
    arm = torch.randint(5, (n,), generator=g)
    radius = 1.0 + 0.3 * torch.randn(n, generator=g)
    side = 0.08 * torch.randn(n, generator=g)
    angle = 2 * math.pi * arm / 5 + 0.6 * radius
    return torch.stack([radius * angle.cos() - side * angle.sin(), radius * angle.sin() + side * angle.cos()], 1)


def diffuse(x, t, noise):
    alpha = torch.cos(0.5 * math.pi * t)
    return alpha * x + (1 - alpha.square()).sqrt() * noise


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--ema", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--dir", default="checkpoints")
    parser.add_argument("--resume", default=None)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed + rank)
    net = Denoiser()
    ema = copy.deepcopy(net).requires_grad_(False)
    shard(net), shard(ema)
    optimizer = torch.optim.NAdam(net.parameters(), lr=args.lr, eps=1e-6)
    noise_rng = torch.Generator().manual_seed(args.seed + 1234)

    def snapshot(step):
        return {
            "net": get_model_state_dict(net),
            "ema": get_model_state_dict(ema),
            "optimizer": get_optimizer_state_dict(net, optimizer),
            "noise_rng": noise_rng.get_state(),
            "step": step,
        }

    first = 0
    if args.resume:
        steps = [int(name.removeprefix("step_")) for name in os.listdir(args.resume)]
        state = snapshot(0)
        dcp.load(state, checkpoint_id=f"{args.resume}/step_{max(steps)}")
        set_model_state_dict(net, state["net"])
        set_model_state_dict(ema, state["ema"])
        set_optimizer_state_dict(net, optimizer, state["optimizer"])
        noise_rng.set_state(state["noise_rng"])
        first = state["step"]

    n = args.batch // world
    mine = slice(rank * n, (rank + 1) * n)
    for step in range(first + 1, args.steps + 1):
        # everything random is drawn for the whole batch, then cut
        x = pinwheel(args.batch, noise_rng)[mine]
        t = torch.rand(args.batch, 1, generator=noise_rng)[mine]
        noise = torch.randn(args.batch, 2, generator=noise_rng)[mine]
        loss = F.mse_loss(net(diffuse(x, t, noise), t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), net.parameters()):
                slow.lerp_(fast, 1 - args.ema)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {shown.item() / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(step), checkpoint_id=f"{args.dir}/step_{step}")

    g = torch.Generator().manual_seed(77)
    x, t, noise = pinwheel(512, g), torch.rand(512, 1, generator=g), torch.randn(512, 2, generator=g)
    with torch.no_grad():
        error = F.mse_loss(ema(diffuse(x, t, noise), t), noise)
    if rank == 0:
        print(f"ema denoising error {error.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Critic for one-class scoring with a spectrally normalised output layer.

The output layer has norm one up to a fixed scale. That scale is measured once on the
untrained network, so that scores start with unit spread, and is kept for the whole run.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import spectral_norm


class CriticBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.a = nn.Linear(cin, cout)
        self.b = nn.Linear(cout, cout)

    def forward(self, x):
        h = F.leaky_relu(self.a(x), 0.2)
        return F.leaky_relu(self.b(h), 0.2)


class Critic(nn.Module):
    def __init__(self, features, width, depth):
        super().__init__()
        sizes = [features] + [width] * depth
        self.blocks = nn.ModuleList(CriticBlock(i, o) for i, o in zip(sizes[:-1], sizes[1:]))
        self.score = spectral_norm(nn.Linear(width, 1))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.score(x).squeeze(-1) * self.scale


class Samples:
    """Real points lie on a curve in feature space; negatives are the same points, shuffled by feature."""

    def __init__(self, features, seed):
        g = torch.Generator().manual_seed(seed)
        self.freq = torch.rand(features, generator=g) * 3 + 0.5
        self.phase = torch.rand(features, generator=g) * 6.28
        self.features = features

    def draw(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        t = torch.rand(n, 1, generator=g) * 2
        real = torch.sin(self.freq * t + self.phase) + 0.05 * torch.randn(n, self.features, generator=g)
        t = torch.rand(n, self.features, generator=g) * 2
        fake = torch.sin(self.freq * t + self.phase) + 0.05 * torch.randn(n, self.features, generator=g)
        return real, fake


def hinge(real, fake):
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


def average(value, world):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value / world


@torch.no_grad()
def settle(critic, batch, rounds):
    """A few forward passes so that the norm estimates belong to the initial weights."""
    critic.train()
    for _ in range(rounds):
        critic(batch)


@torch.no_grad()
def calibrate(critic, batch, world):
    critic.eval()
    out = critic(batch)
    mean = average(out.mean(), world)
    var = average((out - mean).square().mean(), world)
    critic.scale.fill_(var.rsqrt())
    return critic.scale.item()


@torch.no_grad()
def separation(critic, samples, n, rank, world, device):
    critic.eval()
    real, fake = samples.draw(n, seed=31)
    real, fake = critic(real[rank::world].to(device)), critic(fake[rank::world].to(device))
    right = ((real > 0).sum() + (fake < 0).sum()).float() / (2 * n)
    dist.all_reduce(right)
    value = average(hinge(real, fake), world)
    critic.train()
    return value.item(), right.item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--features", type=int, default=16)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--steps", type=int, default=48)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--settle-rounds", type=int, default=20)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(2)
    critic = Critic(args.features, args.width, args.depth).to(device)
    for block in critic.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(critic, mesh=mesh)
    samples = Samples(args.features, seed=12)

    probe = samples.draw(64, seed=5)[0][rank::world].to(device)
    settle(critic, probe, args.settle_rounds)
    scale = calibrate(critic, probe, world)
    if rank == 0:
        print(f"score scale {scale:.5f}", flush=True)

    critic.train()
    opt = torch.optim.Adam(critic.parameters(), lr=args.lr, betas=(0.5, 0.9))
    for step in range(1, args.steps + 1):
        real, fake = samples.draw(args.batch, seed=1000 + step)
        scores = critic(torch.cat([real[rank::world], fake[rank::world]]).to(device))
        loss = hinge(*scores.chunk(2))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 8 == 0:
            shown = average(loss, world).item()
            if rank == 0:
                print(f"step {step:3d} hinge {shown:.6f}", flush=True)

    value, right = separation(critic, samples, 128, rank, world, device)
    critic.reshard()
    sq = sum(w.full_tensor().square().sum() for w in critic.parameters())
    if rank == 0:
        print(f"held-out hinge {value:.6f} accuracy {right:.4f} |w|^2 {sq.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

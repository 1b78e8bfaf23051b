"""Behaviour cloning of a 7-joint arm controller with FSDP2.

The policy sees raw sensor readings (joint angles, velocities, target position,
all in their own physical units) and has to reproduce the torques of an expert.
Observations are normalised inside the network by running moments.

    torchrun --nproc_per_node 2 train.py --steps 30
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

OBS_DIM = 20
ACT_DIM = 7


class ExpertRollouts:
    """Synthetic demonstrations: every episode has its own payload and workspace."""

    def __init__(self, episodes_per_batch, horizon, seed):
        self.episodes = episodes_per_batch
        self.horizon = horizon
        self.seed = seed
        g = torch.Generator().manual_seed(seed)
        self.units = torch.logspace(-1, 1.3, OBS_DIM)
        self.gain = torch.randn(OBS_DIM, ACT_DIM, generator=g) / OBS_DIM**0.5
        self.bias = torch.randn(ACT_DIM, generator=g) * 0.3

    def batch(self, step):
        g = torch.Generator().manual_seed(self.seed * 100003 + step + 1)
        start = torch.randn(self.episodes, 1, OBS_DIM, generator=g) * 1.5 + 0.5
        walk = torch.randn(self.episodes, self.horizon, OBS_DIM, generator=g) * 0.3
        latent = start + walk.cumsum(dim=1) * 0.5
        torque = torch.tanh(latent @ self.gain + self.bias)
        torque = torque + 0.02 * torch.randn(torque.shape, generator=g)
        return latent * self.units, torque

    def local_batch(self, step, rank, world, device):
        obs, act = self.batch(step)
        per_rank = self.episodes // world
        rows = slice(rank * per_rank, (rank + 1) * per_rank)
        return obs[rows].flatten(0, 1).to(device), act[rows].flatten(0, 1).to(device)


class ObservationNorm(nn.Module):
    """Normalises by running first and second moments of the observations."""

    def __init__(self, dim, momentum=0.15, eps=1e-4):
        super().__init__()
        self.momentum = momentum
        self.eps = eps
        self.register_buffer("moments", torch.stack([torch.zeros(dim), torch.ones(dim)]))

    def forward(self, obs):
        mean, square = self.moments[0], self.moments[1]
        var = (square - mean * mean).clamp_min(self.eps)
        out = (obs - mean) * var.rsqrt()
        if self.training:
            with torch.no_grad():
                fresh = torch.stack([obs.mean(0), (obs * obs).mean(0)])
                self.moments.lerp_(fresh, self.momentum)
        return out.clamp(-8.0, 8.0)


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Policy(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.obs_norm = ObservationNorm(OBS_DIM)
        self.stem = nn.Linear(OBS_DIM, width)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, ACT_DIM)

    def forward(self, obs):
        x = self.stem(self.obs_norm(obs))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class BufferAverager:
    """Keeps the floating point buffers of a module equal on all ranks."""

    def __init__(self, module):
        self.buffers = [b for b in module.buffers() if b.is_floating_point()]
        self.world = dist.get_world_size()

    @torch.no_grad()
    def __call__(self):
        if not self.buffers:
            return
        flat = torch.cat([b.reshape(-1) for b in self.buffers])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for b in self.buffers:
            b.copy_(flat[offset:offset + b.numel()].view_as(b))
            offset += b.numel()


def average(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(policy, rollouts, rank, world, device):
    policy.eval()
    total = 0.0
    for i in range(4):
        obs, act = rollouts.local_batch(1_000_000 + i, rank, world, device)
        total += average(F.mse_loss(policy(obs), act))
    policy.train()
    return total / 4


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--episodes", type=int, default=8)
    p.add_argument("--horizon", type=int, default=16)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--depth", type=int, default=3)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=11)
    return p.parse_args()


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    assert args.episodes % world == 0, "episodes must divide by the number of ranks"

    torch.manual_seed(args.seed)
    policy = Policy(args.width, args.depth).to(device)
    for block in policy.blocks:
        fully_shard(block)
    fully_shard(policy)

    sync_buffers = BufferAverager(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=1e-4)
    rollouts = ExpertRollouts(args.episodes, args.horizon, args.seed)

    for step in range(args.steps):
        obs, act = rollouts.local_batch(step, rank, world, device)
        loss = F.mse_loss(policy(obs), act)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sync_buffers()
        mean_loss = average(loss)
        if rank == 0:
            print(f"step {step:3d} loss {mean_loss:.6f}", flush=True)

    score = evaluate(policy, rollouts, rank, world, device)
    if rank == 0:
        print(f"eval mse {score:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

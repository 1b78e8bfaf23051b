"""Hybrid sharding: shards within four ranks, replicas across. Denoises short signals."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LENGTH = 24


class Stage(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv1d(channels, 2 * channels, 5, padding=2)
        self.back = nn.Conv1d(2 * channels, channels, 1)

    def forward(self, x):
        return x + self.back(torch.tanh(self.conv(x)))


class Denoiser(nn.Module):
    def __init__(self, channels=16, depth=3):
        super().__init__()
        self.lift = nn.Conv1d(1, channels, 3, padding=1)
        self.stages = nn.Sequential(*(Stage(channels) for _ in range(depth)))
        self.drop = nn.Conv1d(channels, 1, 3, padding=1)

    def forward(self, x):
        return x + self.drop(self.stages(self.lift(x)))


def mesh_of(world):
    shard = 4 if world > 4 and world % 4 == 0 else world
    return init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def signals(step, rows):
    g = torch.Generator().manual_seed(77_000 + step)
    t = torch.arange(LENGTH) / LENGTH
    phase, speed = torch.rand(rows, 1, generator=g), torch.randint(1, 5, (rows, 1), generator=g)
    clean = torch.sin(2 * torch.pi * (speed * t + phase)).unsqueeze(1)
    return clean + 0.4 * torch.randn(clean.shape, generator=g), clean


class Job:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh = mesh_of(self.world)
        torch.manual_seed(args.seed)
        self.model = Denoiser()
        for stage in self.model.stages:
            fully_shard(stage, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.steps)

    def rows(self, step):
        noisy, clean = signals(step, self.args.batch)
        place = self.rank
        return noisy[place :: self.world], clean[place :: self.world]

    def step(self, step):
        noisy, clean = self.rows(step)
        loss = (self.model(noisy) - clean).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def run(self):
        for step in range(self.args.steps):
            loss = self.step(step)
            if (step + 1) % 10 == 0:
                dist.all_reduce(loss)
                if self.rank == 0:
                    print(f"{step + 1} loss {loss.item() / self.world:.5f}", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.08)
    ap.add_argument("--seed", type=int, default=5)
    options = ap.parse_args()
    dist.init_process_group("gloo")
    Job(options).run()
    dist.destroy_process_group()

"""Image regression with hybrid sharding (2 machines x 2 ranks here): torchrun --nproc-per-node 4 train.py --shard 2"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIDE, WIDTH = 8, 48


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Angle(nn.Module):
    """Tells the direction of the waves in an image."""

    def __init__(self, depth=3):
        super().__init__()
        self.flat = nn.Linear(SIDE * SIDE, WIDTH)
        self.stages = nn.ModuleList(Stage(WIDTH) for _ in range(depth))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, images):
        x = self.flat(images.flatten(1))
        for stage in self.stages:
            x = stage(x)
        return self.out(x)


def waves(count):
    gen = torch.Generator().manual_seed(15)
    angle = 2 * torch.pi * torch.rand(count, 1, 1, generator=gen)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    images = torch.sin(x * angle.cos() + y * angle.sin())
    return images, torch.cat([angle.cos(), angle.sin()], dim=1).flatten(1)


def main(steps, batch, shard):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))
    replica, part = mesh.get_coordinate()
    torch.manual_seed(100 + replica)
    model = Angle()
    for stage in model.stages:
        fully_shard(stage, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, targets = waves(320)
    local = batch // world
    for step in range(steps):
        at = step * batch % len(images) + part * local
        loss = F.mse_loss(model(images[at : at + local]), targets[at : at + local])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=32, help="over all ranks")
    parser.add_argument("--shard", type=int, default=2)
    main(**vars(parser.parse_args()))

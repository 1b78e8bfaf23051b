"""Train a convolutional flow surrogate with the domain split over the ranks.

The field is cut into slabs of rows: each rank loads, processes and keeps only
its own rows of every sample, so that large domains fit. The layers mix points
along a row and over channels; the group normalisation spans the whole domain.
Weights are sharded over the same ranks with FSDP2.
"""
import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass
class Domain:
    rows: int
    cols: int
    rank: int
    world: int

    @property
    def slab(self):
        height = self.rows // self.world
        return slice(self.rank * height, (self.rank + 1) * height)


class AllReduceSum(torch.autograd.Function):
    """Sum over the ranks, in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def domain_mean(x):
    """Average of a per-slab average; all slabs have the same number of points."""
    return AllReduceSum.apply(x) / dist.get_world_size()


class DomainGroupNorm(nn.Module):
    """Group normalisation with the statistics of the full domain."""

    def __init__(self, groups, channels, eps=1e-5):
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        n, c, h, w = x.shape
        g = x.view(n, self.groups, -1)
        mean = domain_mean(g.mean(2, keepdim=True))
        var = domain_mean((g - mean).square().mean(2, keepdim=True))
        y = ((g - mean) * torch.rsqrt(var + self.eps)).view(n, c, h, w)
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class RowConv(nn.Module):
    """3-point convolution along a row, periodic in x."""

    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, (1, 3))

    def forward(self, x):
        return self.conv(F.pad(x, (1, 1, 0, 0), mode="circular"))


class ResBlock(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.norm1 = DomainGroupNorm(groups, channels)
        self.conv1 = RowConv(channels, channels)
        self.norm2 = DomainGroupNorm(groups, channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class FlowSurrogate(nn.Module):
    """Maps inflow, viscosity and geometry channels to velocity and pressure."""

    def __init__(self, cin=4, channels=24, groups=4, depth=3, cout=3):
        super().__init__()
        self.lift = RowConv(cin, channels)
        self.blocks = nn.ModuleList(ResBlock(channels, groups) for _ in range(depth))
        self.norm = DomainGroupNorm(groups, channels)
        self.project = nn.Conv2d(channels, cout, 1)

    def forward(self, x):
        x = self.lift(x)
        for block in self.blocks:
            x = block(x)
        return self.project(F.silu(self.norm(x)))


class ChannelFlow:
    """Synthetic channel flows over a bump: profile in y, modulated in x."""

    def __init__(self, size, domain, seed):
        self.size, self.domain = size, domain
        g = torch.Generator().manual_seed(seed)
        self.inflow = 0.5 + torch.rand(size, generator=g)
        self.viscosity = 0.1 + 0.4 * torch.rand(size, generator=g)
        self.bump = torch.rand(size, 2, generator=g)

    def slab(self, indices):
        d = self.domain
        y = torch.linspace(0, 1, d.rows)[d.slab].view(1, -1, 1)
        x = torch.arange(d.cols).view(1, 1, -1) / d.cols
        inflow = self.inflow[indices].view(-1, 1, 1)
        nu = self.viscosity[indices].view(-1, 1, 1)
        center, height = self.bump[indices].view(-1, 2, 1, 1).unbind(1)
        shape = 0.3 * height * torch.exp(2 * torch.cos(2 * math.pi * (x - center)) - 2)
        depth = (y - shape).clamp(min=0)
        u = 4 * inflow * depth * (1 - y) / (1 - shape) * (1 - 0.5 * nu)
        v = -0.5 * u * torch.sin(2 * math.pi * (x - center)) * shape
        p = (1 - y) + 0.5 * (inflow.square() - u.square()) + nu * torch.cos(2 * math.pi * x)
        ones = torch.ones_like(u)
        inputs = torch.stack([inflow * ones, nu * ones, (y - shape) * ones, y * ones], dim=1)
        return inputs, torch.stack([u, v, p], dim=1)


def reduce_sum(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item()


def squared_error(prediction, target):
    return (prediction - target).square().sum()


@torch.no_grad()
def validate(model, data, device, batch_size=8):
    model.eval()
    error, norm = 0.0, 0.0
    for start in range(0, data.size, batch_size):
        inputs, targets = data.slab(torch.arange(start, start + batch_size))
        prediction = model(inputs.to(device)).cpu()
        error += reduce_sum(squared_error(prediction, targets).to(device))
        norm += reduce_sum(targets.square().sum().to(device))
    model.train()
    return math.sqrt(error / norm)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per step; every rank holds a slab of each")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--cols", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--valid-every", type=int, default=10)
    args = parser.parse_args()

    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if args.rows % world:
        raise ValueError(f"{args.rows} rows cannot be cut into {world} equal slabs")
    domain = Domain(args.rows, args.cols, rank, world)

    torch.manual_seed(0)
    model = FlowSurrogate().to(device)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("domain",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps, eta_min=args.lr * 0.05)

    train = ChannelFlow(128, domain, seed=1)
    valid = ChannelFlow(16, domain, seed=2)
    points = args.batch_size * 3 * args.rows * args.cols
    for step in range(1, args.steps + 1):
        picks = torch.randperm(train.size, generator=torch.Generator().manual_seed(step))[: args.batch_size]
        inputs, targets = (t.to(device) for t in train.slab(picks))
        error = squared_error(model(inputs), targets)
        # The mean is over the points of all slabs; FSDP averages gradients over the ranks.
        (error * world / points).backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        loss = reduce_sum(error) / points
        if rank == 0 and (step % 5 == 0 or step == 1):
            print(f"step {step:3d} mse {loss:.6f} grad_norm {grad_norm.item():.5f}", flush=True)
        if step % args.valid_every == 0:
            relative = validate(model, valid, device)
            if rank == 0:
                print(f"step {step:3d} valid relative L2 {relative:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Two-task dense prediction (depth and surface slope) with learned task weights.

The losses are weighted by learned log variances. Parameter groups carry names, for the
learning rate table that is printed at the start and for the log.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SIDE = 16


class ConvStage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=2, dilation=2)

    def forward(self, x):
        return x + self.conv2(F.silu(self.conv1(F.silu(self.norm(x)))))


class TaskWeights(nn.Module):
    """Homoscedastic uncertainty: exp(-s) * loss + s for each task."""

    def __init__(self, tasks):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses):
        return (torch.exp(-self.log_var) * losses + self.log_var).sum()


class DenseNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.stages = nn.ModuleList(ConvStage(width) for _ in range(depth))
        self.depth = nn.Conv2d(width, 1, 1)
        self.slope = nn.Conv2d(width, 2, 1)

    def forward(self, image, depth, slope):
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x)
        return torch.stack([F.l1_loss(self.depth(x), depth), F.mse_loss(self.slope(x), slope)])


def scenes(count, seed):
    """Smooth height fields, lit from the left; slope is the field's gradient."""
    g = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 1, 5, 5, generator=g)
    depth = F.interpolate(coarse, size=(SIDE, SIDE), mode="bicubic", align_corners=True)
    padded = F.pad(depth, (1, 1, 1, 1), mode="replicate")
    dx = (padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]) / 2
    dy = (padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]) / 2
    image = 1.5 * dx + 0.4 * depth + 0.05 * torch.randn(depth.shape, generator=g)
    return image, depth, torch.cat([dx, dy], 1)


def named_groups(modules, lr, weight_decay):
    """Decay for kernels, none for the rest; task weights learn ten times faster."""
    kernels, rest, tasks = [], [], []
    for module in modules:
        for name, p in module.named_parameters():
            if name.endswith("log_var"):
                tasks.append(p)
            elif p.dim() > 1:
                kernels.append(p)
            else:
                rest.append(p)
    return [
        {"params": kernels, "lr": lr, "weight_decay": weight_decay, "label": "kernels"},
        {"params": rest, "lr": lr, "weight_decay": 0.0, "label": "rest"},
        {"params": tasks, "lr": 10 * lr, "weight_decay": 0.0, "label": "tasks"},
    ]


def attach_names(modules, optimizer):
    names = {p: name for module in modules for name, p in module.named_parameters()}
    for group in optimizer.param_groups:
        group["param_names"] = [names[p] for p in group["params"]]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--depth", type=int, default=3)
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--lr", type=float, default=3e-3)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(33)
    model = DenseNet(args.width, args.depth).to(device)
    tasks = TaskWeights(2).to(device)  # two numbers, whole on every rank
    for stage in model.stages:
        fully_shard(stage, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(named_groups([model, tasks], args.lr, 0.02))
    attach_names([model, tasks], optimizer)
    if rank == 0:
        for group in optimizer.param_groups:
            print(f"{group['label']:8s} lr {group['lr']:.4f}: {len(group['param_names'])} tensors, first {group['param_names'][0]}")

    n = args.batch // world
    own = slice(rank * n, (rank + 1) * n)

    def mean(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return (value / world).tolist()

    for step in range(1, args.steps + 1):
        batch = [t[own].to(device) for t in scenes(args.batch, 100 + step)]
        loss = tasks(model(*batch))
        loss.backward()
        dist.all_reduce(tasks.log_var.grad)
        tasks.log_var.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        if step % 8 == 0:
            with torch.no_grad():
                losses = model(*[t[own].to(device) for t in scenes(args.batch, 9)])
            depth, slope = mean(losses)
            total = mean(loss)
            if rank == 0:
                print(f"step {step:3d} loss {total:.5f} valid depth {depth:.5f} slope {slope:.5f}", flush=True)

    if rank == 0:
        print("log variances " + " ".join(f"{v:.5f}" for v in tasks.log_var.tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Sharpness-aware minimisation (SAM) of a small patch classifier.

Checkpoints are plain .npz files of whole arrays written by rank 0, so a run can be
continued at any number of ranks.
"""
import argparse
import os
import re

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class PatchMixer(nn.Module):
    def __init__(self, patches, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Linear(patches, patches)
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.n2(x))


class MixerNet(nn.Module):
    def __init__(self, classes=5, dim=24, depth=2):
        super().__init__()
        self.embed = nn.Conv2d(1, dim, 4, stride=4)
        self.blocks = nn.ModuleList([PatchMixer(9, dim) for _ in range(depth)])
        self.fc = nn.Linear(dim, classes)

    def forward(self, img):
        x = self.embed(img).flatten(2).transpose(1, 2)
        for b in self.blocks:
            x = b(x)
        return self.fc(x.mean(1))


class SAM:
    def __init__(self, optimizer, rho):
        self.optimizer, self.rho = optimizer, rho
        self.params = [p for g in optimizer.param_groups for p in g["params"]]

    @torch.no_grad()
    def grad_norm(self):
        sq = torch.stack([p.grad.to_local().square().sum() for p in self.params]).sum()
        dist.all_reduce(sq)
        return sq.sqrt()

    @torch.no_grad()
    def climb(self):
        """w -> w + rho * g / |g|; remembers w."""
        factor = self.rho / (self.grad_norm() + 1e-12)
        self.saved = [p.to_local().clone() for p in self.params]
        for p in self.params:
            p.to_local().add_(p.grad.to_local() * factor)

    @torch.no_grad()
    def descend(self):
        """Back to w, then a step with the gradients of the climbed point."""
        for p, w in zip(self.params, self.saved):
            p.to_local().copy_(w)
        self.saved = None
        self.optimizer.step()


def blobs(n, gen, classes=5):
    """Images with a bright bar whose angle is the class."""
    y = torch.randint(classes, (n,), generator=gen)
    grid = torch.linspace(-1, 1, 12)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    angle = (y.float() / classes * torch.pi)[:, None, None]
    shift = 0.4 * torch.rand(n, 1, 1, generator=gen) - 0.2
    img = torch.exp(-((xx * angle.cos() + yy * angle.sin() - shift) ** 2) / 0.05)
    return img[:, None] + 0.4 * torch.randn(n, 1, 12, 12, generator=gen), y


def save(folder, step, named, opt):
    arrays = {"step": np.array(step)}
    for name, p in named:
        arrays["w." + name] = p.detach().full_tensor().numpy()
        arrays["m." + name] = opt.state[p]["momentum_buffer"].full_tensor().numpy()
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
        tmp = os.path.join(folder, "unfinished.npz")
        np.savez(tmp, **arrays)
        os.replace(tmp, os.path.join(folder, f"s{step}.npz"))
    dist.barrier()


@torch.no_grad()
def load(folder, named, opt):
    step = max(int(m[1]) for m in map(re.compile(r"s(\d+)\.npz").fullmatch, os.listdir(folder)) if m)
    arrays = np.load(os.path.join(folder, f"s{step}.npz"))
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, p in named:
        size = -(-p.shape[0] // world)
        rows = slice(rank * size, (rank + 1) * size)
        p.to_local().copy_(torch.from_numpy(arrays["w." + name][rows]))
        buf = torch.zeros_like(p)
        buf.to_local().copy_(torch.from_numpy(arrays["m." + name][rows]))
        opt.state[p]["momentum_buffer"] = buf
    return step


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=15)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = MixerNet()
    mesh = init_device_mesh("cpu", (world,))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    named = list(model.named_parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, weight_decay=1e-4)
    sam = SAM(opt, rho=0.05)
    train_x, train_y = blobs(400, torch.Generator().manual_seed(1))
    test_x, test_y = (t.chunk(world)[rank] for t in blobs(400, torch.Generator().manual_seed(2)))

    start = load(args.resume, named, opt) if args.resume else 0
    for step in range(start, args.steps):
        idx = torch.randint(400, (48,), generator=torch.Generator().manual_seed(70 + step)).chunk(world)[rank]
        first = F.cross_entropy(model(train_x[idx]), train_y[idx])
        first.backward()
        sam.climb()
        opt.zero_grad()
        F.cross_entropy(model(train_x[idx]), train_y[idx]).backward()
        sam.descend()
        opt.zero_grad()
        if args.out and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, named, opt)
        if (step + 1) % 10 == 0:
            with torch.no_grad():
                right = (model(test_x).argmax(1) == test_y).float().sum()
            model.reshard()
            report = torch.stack([right / 400, first.detach() / world])
            dist.all_reduce(report)
            if rank == 0:
                print(f"step {step + 1} loss {report[1].item():.4f} test accuracy {report[0].item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

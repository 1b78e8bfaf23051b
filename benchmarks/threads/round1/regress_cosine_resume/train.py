"""Regress a smooth 2-d field with a residual MLP, FSDP2 + AdamW + cosine schedule."""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

# one flat key per parameter and field, so that parts can be resharded one by one
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.nn.functional.silu(self.fc1(self.norm(x))))


class FieldNet(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.inp = nn.Linear(2, width)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h)
        return self.out(h).squeeze(-1)


def field(x):
    return torch.sin(3 * x[:, 0]) * torch.cos(2 * x[:, 1]) + 0.3 * x[:, 0]


class PointStream:
    """Stateless stream of training points: batch i is a function of i only."""

    def __init__(self, global_batch, rank, world):
        self.n, self.rank, self.world = global_batch, rank, world

    def batch(self, i):
        g = torch.Generator().manual_seed(1234 + i)
        x = torch.rand(self.n, 2, generator=g) * 2 - 1
        x = x[self.rank :: self.world]
        return x, field(x)


class Checkpointer:
    def __init__(self, root, model, optimizer, scheduler):
        self.root, self.model, self.optimizer, self.scheduler = root, model, optimizer, scheduler

    def _dir(self, part):
        return os.path.join(self.root, part)

    def save(self, step):
        dcp.save({"state": get_model_state_dict(self.model)}, checkpoint_id=self._dir("model"))
        optim_state = get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)
        dcp.save({"state": optim_state}, checkpoint_id=self._dir("optimizer"))
        if dist.get_rank() == 0:
            torch.save({"step": step, "lr_scheduler": self.scheduler.state_dict()}, self._dir("trainer.pt"))
        dist.barrier()

    def load(self):
        state = {"state": get_model_state_dict(self.model)}
        dcp.load(state, checkpoint_id=self._dir("model"))
        set_model_state_dict(self.model, state["state"])

        state = {"state": get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)}
        dcp.load(state, checkpoint_id=self._dir("optimizer"))
        set_optimizer_state_dict(self.model, self.optimizer, state["state"], options=FLAT)

        trainer = torch.load(self._dir("trainer.pt"), weights_only=True)
        self.scheduler.load_state_dict(trainer["lr_scheduler"])
        return trainer["step"]


@torch.no_grad()
def evaluate(model, rank, world, device):
    side = 16
    axis = torch.linspace(-1, 1, side)
    grid = torch.cartesian_prod(axis, axis)[rank::world].to(device)
    err = (model(grid) - field(grid)).square().sum()
    dist.all_reduce(err)
    return math.sqrt(err.item() / side**2)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--ckpt", default="")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))

    torch.manual_seed(3)
    model = FieldNet().to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps, eta_min=1e-4)
    stream = PointStream(args.global_batch, rank, world)
    ckpt = Checkpointer(args.ckpt, model, optimizer, scheduler)

    step = ckpt.load() if args.resume else 0
    while step < args.steps:
        t0 = time.perf_counter()
        x, y = stream.batch(step)
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1

        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:3d} | mse {mean.item():.6f} | {time.perf_counter() - t0:.3f}s", flush=True)
        if args.save_every and step % args.save_every == 0 and step < args.steps:
            ckpt.save(step)

    rmse = evaluate(model, rank, world, device)
    if rank == 0:
        print(f"done, rmse on the grid {rmse:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

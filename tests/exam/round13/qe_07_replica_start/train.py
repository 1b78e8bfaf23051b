"""Hybrid sharding (replicate x shard) for a small two-stream relevance model."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.w = nn.Linear(width, width)
        self.o = nn.Linear(width, width)

    def forward(self, x, other):
        return x + self.o(torch.tanh(self.w(self.norm(x))) * other)


class Relevance(nn.Module):
    def __init__(self, inputs=12, width=32, classes=4, depth=2):
        super().__init__()
        self.query, self.item = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.layers = nn.ModuleList(Cross(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, q, d):
        x, y = self.query(q), torch.tanh(self.item(d))
        for layer in self.layers:
            x = layer(x, y)
        return self.head(x)


def seed_everything(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def build_mesh():
    world = dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


def batch(step, size):
    g = torch.Generator().manual_seed(50 + step)
    q, d = torch.randn(size, 12, generator=g), torch.randn(size, 12, generator=g)
    score = (q[:, :6] * d[:, :6]).sum(1) + 0.5 * q[:, 7]
    labels = torch.bucketize(score, torch.tensor([-2.0, 0.0, 2.0]))
    rank, world = dist.get_rank(), dist.get_world_size()
    return [t.chunk(world)[rank] for t in (q, d, labels)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--seed", type=int, default=1234)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    mesh = build_mesh()
    rank = dist.get_rank()
    seed_everything(args.seed)
    model = Relevance()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, eps=1e-5, weight_decay=0.01)

    def bundle(step):
        weights, optim = get_state_dict(model, optimizer)
        return {"weights": weights, "optim": optim, "step": step}

    step = 0
    if args.resume:
        saved = bundle(0)
        dcp.load(saved, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optimizer, model_state_dict=saved["weights"], optim_state_dict=saved["optim"])
        step = saved["step"]

    while step < args.steps:
        q, d, labels = batch(step, args.batch)
        loss = F.cross_entropy(model(q, d), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        step += 1
        if step % 6 == 0:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d} loss {mean.item():.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(bundle(step), checkpoint_id=os.path.join(args.out, f"step{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Multi-view classification with hybrid sharding (replicate x shard) on FSDP2.

Several camera views of an object are encoded by a shared trunk and pooled.  The mesh
has two dimensions: inside a node parameters are sharded, across nodes replicated.
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VIEWS, PIXELS, CLASSES, WIDTH = 3, 30, 8, 32


class TrunkBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


class MultiViewNet(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.stem = nn.Linear(PIXELS, WIDTH)
        self.view = nn.Embedding(VIEWS, WIDTH)
        self.blocks = nn.ModuleList(TrunkBlock() for _ in range(depth))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        h = self.stem(x) + self.view.weight
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


class Parallel:
    """Process groups and mesh of a run."""

    def __init__(self, replicas):
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        replicas = replicas if self.world % replicas == 0 else 1
        self.mesh = init_device_mesh(
            self.device.type, (replicas, self.world // replicas), mesh_dim_names=("dp_replicate", "dp_shard")
        )

    @property
    def dp_group(self):
        return dist.group.WORLD

    @property
    def dp_shard_group(self):
        return self.mesh.get_group("dp_shard")


def local_pth_sum(grads, p, chunk=8):
    """Sum of |g|^p over this rank's shards, a bounded number of tensors at a time."""
    total = None
    for i in range(0, len(grads), chunk):
        norms = torch._foreach_norm([g.float() for g in grads[i : i + chunk]], p)
        part = torch.stack(norms).pow(p).sum()
        total = part if total is None else total + part
    return total


@torch.no_grad()
def clip_grad_norm(model, max_norm, parallel, p=2.0):
    grads = [w.grad.to_local() if isinstance(w.grad, DTensor) else w.grad for w in model.parameters() if w.grad is not None]
    grads = [g for g in grads if g.numel()]
    total = local_pth_sum(grads, p) if grads else torch.zeros((), device=parallel.device)
    dist.all_reduce(total, group=parallel.dp_shard_group)
    norm = total ** (1.0 / p)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if grads:
        torch._foreach_mul_(grads, scale)
    return norm


def views(step, size, templates, rank, world):
    g = torch.Generator().manual_seed(3 * 10**5 + step)
    y = torch.randint(CLASSES, (size,), generator=g)
    x = templates[y] + torch.randn(size, VIEWS, PIXELS, generator=g)
    return x[rank::world], y[rank::world]


def main(argv):
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.15)
    ap.add_argument("--momentum", type=float, default=0.9)
    ap.add_argument("--max-grad-norm", type=float, default=0.7)
    ap.add_argument("--replicas", type=int, default=2)
    args = ap.parse_args(argv)

    par = Parallel(args.replicas)
    torch.manual_seed(55)
    templates = torch.randn(CLASSES, VIEWS, PIXELS) * 0.6
    model = MultiViewNet().to(par.device)
    for block in model.blocks:
        fully_shard(block, mesh=par.mesh)
    fully_shard(model, mesh=par.mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)

    for step in range(args.steps):
        x, y = views(step, args.batch, templates, par.rank, par.world)
        loss = F.cross_entropy(model(x.to(par.device)), y.to(par.device))
        loss.backward()
        norm = clip_grad_norm(model, args.max_grad_norm, par)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() / par.world
        dist.all_reduce(mean, group=par.dp_group)
        if par.rank == 0:
            print(f"step {step:2d}  loss {mean.item():.6f}  grad norm {norm.item():.5f}", flush=True)

    with torch.no_grad():
        x, y = views(10**6, 128, templates, par.rank, par.world)
        hits = (model(x.to(par.device)).argmax(-1) == y.to(par.device)).sum()
    dist.all_reduce(hits, group=par.dp_group)
    if par.rank == 0:
        print(f"held-out accuracy {hits.item() / 128:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

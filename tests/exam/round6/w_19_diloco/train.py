"""DiLoCo: two replicas, each an FSDP2 model of half of the ranks, train alone and meet every four steps."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

REPLICA_BATCH, MEET = 16, 4


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Linear(12, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.out = nn.Linear(width, 6)

    def forward(self, x):
        h = F.gelu(self.inp(x))
        for layer in self.hidden:
            h = h + F.gelu(layer(h))
        return self.out(h)


def batch(step, replica):
    g = torch.Generator().manual_seed(1000 * replica + step)
    centers = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    y = torch.randint(6, (REPLICA_BATCH,), generator=g)
    # each replica has its own mixture of classes
    y = torch.where(torch.rand(REPLICA_BATCH, generator=g) < 0.5, y, (y % 3) + 3 * replica)
    return centers[y] + 0.8 * torch.randn(REPLICA_BATCH, 12, generator=g), y


class OuterNesterov:
    """Works on local shards: a rank and its partners in the other replica hold the same part of the weights."""

    def __init__(self, params, group, lr=0.7, momentum=0.6):
        self.params, self.group, self.lr, self.momentum = list(params), group, lr, momentum
        self.anchor = [p.to_local().detach().clone() for p in self.params]
        self.velocity = [torch.zeros_like(a) for a in self.anchor]

    @torch.no_grad()
    def step(self):
        for p, a, v in zip(self.params, self.anchor, self.velocity):
            local = p.to_local()
            delta = a - local
            dist.all_reduce(delta, group=self.group)
            delta /= dist.get_world_size(self.group)
            v.mul_(self.momentum).add_(delta)
            a.sub_(delta + self.momentum * v, alpha=self.lr)
            local.copy_(a)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replica", "shard"))
    replica, part = mesh.get_local_rank("replica"), mesh.get_local_rank("shard")

    torch.manual_seed(0)
    model = Net()
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=4e-3)
    outer = OuterNesterov(model.parameters(), mesh.get_group("replica"))

    step = 0
    if args.resume:
        step = max(int(d.removeprefix("at")) for d in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, f"at{step}", f"replica{replica}_part{part}.pt"), weights_only=False)
        model.load_state_dict(ck["model"])
        inner.load_state_dict(ck["inner"])
        outer.anchor, outer.velocity = ck["anchor"], ck["velocity"]
    while step < args.steps:
        x, y = (t.chunk(world // replicas)[part] for t in batch(step, replica))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        inner.step()
        inner.zero_grad()
        step += 1
        # the replicas' weights differ between two meetings; the last steps end with one too
        if step % MEET == 0 or step == args.steps:
            outer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            folder = os.path.join(args.out, f"at{step}")
            os.makedirs(folder, exist_ok=True)
            torch.save({"model": model.state_dict(), "inner": inner.state_dict(), "anchor": outer.anchor,
                        "velocity": outer.velocity}, os.path.join(folder, f"replica{replica}_part{part}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

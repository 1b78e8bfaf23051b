"""Only rank 0 has the data: it scatters the shares of every batch. Lion, written on the local shards. One checkpoint
file per rank, bound to the number of ranks.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 5 --out ckpt
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

FEATURES, CLASSES = 24, 5


class LocalLion:
    """sign(b1 m + (1 - b1) g): elementwise, so each rank can treat its own shards as plain tensors."""

    def __init__(self, named, lr, betas=(0.9, 0.98), wd=0.02):
        self.named = dict(named)
        self.lr, self.betas, self.wd = lr, betas, wd
        self.m = {n: torch.zeros_like(p.to_local()) for n, p in self.named.items()}

    @torch.no_grad()
    def step(self, scale=1.0):
        for n, p in self.named.items():
            w, g, m = p.to_local(), p.grad.to_local() * scale, self.m[n]
            direction = (self.betas[0] * m + (1 - self.betas[0]) * g).sign_()
            w.mul_(1 - self.lr * self.wd if p.ndim > 1 else 1.0).sub_(direction, alpha=self.lr)
            m.mul_(self.betas[1]).add_(g, alpha=1 - self.betas[1])
            p.grad = None

    def global_norm(self):
        sq = sum((p.grad.to_local().double() ** 2).sum() for p in self.named.values())
        dist.all_reduce(sq)
        return sq.sqrt().item()


class DataServer:
    """Rank 0: draws batches from one generator. Other ranks: receive."""

    def __init__(self, batch, rank, world):
        assert batch % world == 0
        self.rank, self.world, self.local = rank, world, batch // world
        self.batch = batch
        if rank == 0:
            g = torch.Generator().manual_seed(0)
            proto = torch.randn(CLASSES, FEATURES, generator=g)
            self.y = torch.randint(0, CLASSES, (900,), generator=g)
            self.x = proto[self.y] + 1.1 * torch.randn(900, FEATURES, generator=g)
            self.gen = torch.Generator().manual_seed(1)

    def next(self):
        x, y = torch.empty(self.local, FEATURES), torch.empty(self.local, dtype=torch.long)
        if self.rank == 0:
            idx = torch.randint(0, len(self.y), (self.batch,), generator=self.gen)
            jitter = 0.1 * torch.randn(self.batch, FEATURES, generator=self.gen)
            xs, ys = (self.x[idx] + jitter).chunk(self.world), self.y[idx].chunk(self.world)
            dist.scatter(x, [t.contiguous() for t in xs], src=0)
            dist.scatter(y, [t.contiguous() for t in ys], src=0)
        else:
            dist.scatter(x, None, src=0)
            dist.scatter(y, None, src=0)
        return x, y

    def state(self):
        return self.gen.get_state() if self.rank == 0 else None

    def set_state(self, state):
        if self.rank == 0:
            self.gen.set_state(state)


class Net(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.stem = nn.Linear(FEATURES, width)
        self.mid = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Mish(), nn.LayerNorm(width)) for _ in range(3)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for m in self.mid:
            x = x + m(x)
        return self.head(x)


def save(out, step, model, lion, server, rank, world):
    folder = os.path.join(out, f"step_{step:06d}")
    os.makedirs(folder, exist_ok=True)
    mine = {
        "w": {n: p.detach().to_local().clone() for n, p in model.named_parameters()},
        "m": lion.m,
        "data": server.state(),
    }
    torch.save(mine, os.path.join(folder, f"rank{rank}.pt"))
    dist.barrier()  # the marker is written only when every rank has its file
    if rank == 0:
        with open(os.path.join(folder, "done.json"), "w") as f:
            json.dump({"step": step, "world": world}, f)
    dist.barrier()


def resume(folder, model, lion, server, rank, world):
    done = sorted(d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, "done.json")))
    path = os.path.join(folder, done[-1])
    with open(os.path.join(path, "done.json")) as f:
        meta = json.load(f)
    if meta["world"] != world:
        raise SystemExit(f"saved with {meta['world']} ranks, started with {world}")
    mine = torch.load(os.path.join(path, f"rank{rank}.pt"), weights_only=True)
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(mine["w"][n])
            lion.m[n].copy_(mine["m"][n])
    server.set_state(mine["data"])
    return meta["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(10)
    model = Net()
    for m in model.mid:
        fully_shard(m)
    fully_shard(model)
    lion = LocalLion(model.named_parameters(), args.lr)
    server = DataServer(args.batch, rank, world)
    step = resume(args.resume, model, lion, server, rank, world) if args.resume else 0

    while step < args.steps:
        x, y = server.next()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = lion.global_norm()
        lion.step(scale=min(1.0, 1.0 / (norm + 1e-6)))
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item():.4f} norm {norm:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, model, lion, server, rank, world)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

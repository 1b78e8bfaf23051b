"""SwAV: online clustering with multi-crop, a feature queue and prototypes on the unit sphere."""
import argparse
import dataclasses
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sinkhorn import sinkhorn_assign


@dataclasses.dataclass
class Settings:
    steps: int = 18
    batch: int = 16
    prototypes: int = 20
    dim: int = 24
    queue: int = 48
    queue_start: int = 5
    freeze_prototypes: int = 3
    lr: float = 0.1
    temperature: float = 0.2
    seed: int = 12


class Encoder(nn.Module):
    def __init__(self, dim, prototypes, ch=16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, ch, 3, 2, 1), nn.GroupNorm(4, ch), nn.GELU(),
                                   nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.GroupNorm(4, 2 * ch), nn.GELU())
        self.project = nn.Sequential(nn.Linear(2 * ch, 2 * ch), nn.GELU(), nn.Linear(2 * ch, dim))
        self.prototypes = nn.Linear(dim, prototypes, bias=False)

    def forward(self, crops, extra=None):
        z = [F.normalize(self.project(self.trunk(c).mean((2, 3))), dim=-1) for c in crops]
        scores = [self.prototypes(v) for v in z]
        extra_scores = None if extra is None else self.prototypes(extra).detach()
        return z, scores, extra_scores


class Nesterov:
    """Plain SGD with Nesterov momentum on the local shards; state in lists, in the order of the parameters."""

    def __init__(self, named, momentum=0.9, weight_decay=1e-4):
        self.named = list(named)
        self.momentum, self.weight_decay = momentum, weight_decay
        self.velocity = [torch.zeros_like(self.local(p)) for _, p in self.named]

    @staticmethod
    def local(t):
        return t.to_local() if isinstance(t, DTensor) else t

    @torch.no_grad()
    def step(self, lr, skip=()):
        for (name, p), v in zip(self.named, self.velocity):
            if name in skip:
                p.grad = None
                continue
            w, g = self.local(p), self.local(p.grad)
            g = g + self.weight_decay * w
            v.mul_(self.momentum).add_(g)
            w.sub_(lr * (g + self.momentum * v))
            p.grad = None


@torch.no_grad()
def normalize_prototypes(weight):
    # dimension 0 is the sharded one, so a shard holds whole prototypes
    w = Nesterov.local(weight)
    w.copy_(F.normalize(w, dim=1))


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(6, (n,), generator=g)
    base = torch.randn(6, 3, 4, 4, generator=g)
    x = F.interpolate(base, size=(16, 16), mode="bilinear")[kind]
    return x + 0.3 * torch.randn(x.shape, generator=g)


def multi_crop(x, g):
    """Two large and two small crops; the same windows for the whole batch, own noise for every image."""
    crops = []
    for size in (12, 12, 8, 8):
        top, left = torch.randint(0, 16 - size + 1, (2,), generator=g).tolist()
        c = x[:, :, top:top + size, left:left + size]
        crops.append(c + 0.1 * torch.randn(c.shape, generator=g))
    return crops


class Run:
    def __init__(self, cfg):
        self.cfg, self.rank, self.world = cfg, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.model = Encoder(cfg.dim, cfg.prototypes)
        fully_shard(self.model.trunk)
        fully_shard(self.model.project)
        fully_shard(self.model)
        normalize_prototypes(self.model.prototypes.weight)
        self.opt = Nesterov(self.model.named_parameters())
        self.data = images(256, cfg.seed)
        self.queue = torch.zeros(2, cfg.queue, cfg.dim)
        self.step = 0

    def gathered(self, z):
        parts = [torch.empty_like(z) for _ in range(self.world)]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    def train_step(self):
        c = self.cfg
        g = torch.Generator().manual_seed(c.seed * 10_000 + self.step)
        idx = torch.randint(len(self.data), (c.batch,), generator=g)
        crops = [v.chunk(self.world)[self.rank] for v in multi_crop(self.data[idx], g)]
        use_queue = self.step >= c.queue_start
        # the queue is equal on all ranks, every rank scores its part of it
        old = self.queue.chunk(self.world, dim=1)[self.rank].flatten(0, 1) if use_queue else None
        z, scores, old_scores = self.model(crops, old)
        loss = 0.0
        for i in range(2):
            pool = scores[i].detach()
            if use_queue:
                pool = torch.cat([pool, old_scores.chunk(2)[i]])
            codes = sinkhorn_assign(pool)[: len(scores[i])]
            for j in range(len(crops)):
                if j != i:
                    loss = loss - (codes * F.log_softmax(scores[j] / c.temperature, -1)).sum(-1).mean()
        loss = loss / (2 * (len(crops) - 1))
        loss.backward()
        lr = c.lr * (1 - self.step / c.steps) ** 0.9
        self.opt.step(lr, skip=("prototypes.weight",) if self.step < c.freeze_prototypes else ())
        normalize_prototypes(self.model.prototypes.weight)
        for i in range(2):
            fresh = self.gathered(z[i].detach())
            self.queue[i] = torch.cat([fresh, self.queue[i, : -len(fresh)]])
        self.step += 1
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def state(self):
        return {"weights": [Nesterov.local(p).detach() for p in self.model.parameters()],
                "velocity": self.opt.velocity, "queue": self.queue, "step": self.step}

    def save(self, root):
        final = os.path.join(root, f"{self.step:04d}")
        partial = final + ".partial"
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            os.makedirs(partial)
        dist.barrier()
        torch.save(self.state(), os.path.join(partial, f"shard_{self.rank}_of_{self.world}.pt"))
        dist.barrier()
        if self.rank == 0:
            os.rename(partial, final)
        dist.barrier()

    @torch.no_grad()
    def load(self, root):
        newest = sorted(d for d in os.listdir(root) if not d.endswith(".partial"))[-1]
        s = torch.load(os.path.join(root, newest, f"shard_{self.rank}_of_{self.world}.pt"))
        for p, w in zip(self.model.parameters(), s["weights"]):
            Nesterov.local(p).copy_(w)
        self.opt.velocity, self.queue, self.step = s["velocity"], s["queue"], s["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--checkpoint-every", type=int, default=0)
    ap.add_argument("--checkpoints", default="swav")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(Settings())
    if args.resume:
        run.load(args.checkpoints)
    while run.step < run.cfg.steps:
        loss = run.train_step()
        if run.rank == 0:
            print(f"{run.step:3d} loss {loss:.5f}")
        if args.checkpoint_every and run.step % args.checkpoint_every == 0:
            run.save(args.checkpoints)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

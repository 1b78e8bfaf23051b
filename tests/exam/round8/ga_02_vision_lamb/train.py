"""Patch classifier on synthetic images, trained with LAMB."""
import argparse
import glob
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from lamb import Lamb, local


class Mixer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tok = nn.Linear(tokens, tokens, bias=False)
        self.up, self.down = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x):
        x = x + self.tok(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Classifier(nn.Module):
    def __init__(self, classes=6, dim=32, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.blocks = nn.ModuleList(Mixer(16, dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x).mean(1))


class Images:
    def __init__(self, classes=6):
        self.proto = torch.randn(classes, 1, 16, 16, generator=torch.Generator().manual_seed(5))
        self.classes = classes

    def batch(self, step, size):
        g = torch.Generator().manual_seed(step * 31 + 2)
        y = torch.randint(self.classes, (size,), generator=g)
        return self.proto[y] + 1.5 * torch.randn(size, 1, 16, 16, generator=g), y


class Trainer:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(11)
        self.model = Classifier()
        for b in self.model.blocks:
            fully_shard(b)
        fully_shard(self.model)
        decay = [p for p in self.model.parameters() if p.ndim > 1]
        rest = [p for p in self.model.parameters() if p.ndim <= 1]
        self.opt = Lamb([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=args.lr)
        self.data, self.step = Images(), 0

    def lr_at(self, step):
        warm = min(1.0, (step + 1) / 5)
        return self.args.lr * warm * 0.5 * (1 + math.cos(math.pi * step / self.args.steps))

    def save(self):
        folder = os.path.join(self.args.out, f"{self.step:05d}")
        os.makedirs(folder, exist_ok=True)
        torch.save({"step": self.step, "optim": self.opt.state_dict(),
                    "model": {n: local(p).clone() for n, p in self.model.state_dict().items()}},
                   os.path.join(folder, f"shard_{self.rank}_of_{self.world}.pt"))
        dist.barrier()

    def load(self, folder):
        folder = sorted(glob.glob(os.path.join(folder, "[0-9]*")))[-1]
        blob = torch.load(os.path.join(folder, f"shard_{self.rank}_of_{self.world}.pt"))
        with torch.no_grad():
            for n, p in self.model.state_dict().items():
                local(p).copy_(blob["model"][n])
        self.opt.load_state_dict(blob["optim"])
        self.step = blob["step"]

    def fit(self):
        while self.step < self.args.steps:
            for group in self.opt.param_groups:
                group["lr"] = self.lr_at(self.step)
            x, y = self.data.batch(self.step, self.args.batch)
            x, y = x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]
            loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            mean = loss.detach() / self.world
            dist.all_reduce(mean)
            if self.rank == 0 and self.step % 5 == 0:
                print(f"{self.step:3d} loss {mean.item():.4f}")
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    def export(self, path):
        full = {n: p.full_tensor() for n, p in self.model.state_dict().items()}
        if self.rank == 0:
            torch.save(full, path)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit()
    if args.export:
        trainer.export(args.export)
    dist.destroy_process_group()

"""Energy model for small clusters with a Morse potential, trained with micro-batch accumulation."""
import argparse
import json
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class Config:
    n_clusters: int = 80
    n_atoms: int = 6
    micro: int = 8              # clusters per micro-batch, over all ranks
    accum: int = 4              # micro-batches per optimizer step
    epochs: int = 10
    lr: float = 8e-3
    warmup: int = 4
    seed: int = 3


def clusters(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    octahedron = torch.cat([torch.eye(3), -torch.eye(3)]) * 1.2
    size = 0.8 + 0.7 * torch.rand(cfg.n_clusters, 1, 1, generator=g)
    pos = octahedron * size + 0.08 * torch.randn(cfg.n_clusters, cfg.n_atoms, 3, generator=g)
    d = torch.cdist(pos, pos) + torch.eye(cfg.n_atoms) * 100
    energy = ((1 - torch.exp(-1.2 * (d - 1.5))).square() - 1).sum((1, 2)) / 2
    return pos, (energy - energy.mean()) / energy.std()


class RadialBasis(nn.Module):
    def __init__(self, n=16, cutoff=5.0):
        super().__init__()
        self.register_buffer("centres", torch.linspace(0.3, cutoff, n))
        self.gamma = (n / cutoff) ** 2

    def forward(self, d):
        return torch.exp(-self.gamma * (d[..., None] - self.centres) ** 2)


class Interaction(nn.Module):
    def __init__(self, dim, n_rbf):
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(n_rbf, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.mix = nn.Linear(dim, dim)

    def forward(self, h, rbf, pair):
        w = self.filter(rbf) * pair[..., None]
        return h + F.silu(self.mix((w * h[:, None]).sum(2)))


class ClusterNet(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.start = nn.Parameter(torch.randn(dim) * 0.5)
        self.rbf = RadialBasis()
        self.layers = nn.ModuleList(Interaction(dim, 16) for _ in range(depth))
        self.out = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 1))

    def forward(self, pos):
        n = pos.shape[1]
        pair = 1 - torch.eye(n)
        d = ((pos[:, :, None] - pos[:, None]).square().sum(-1) + torch.eye(n)).sqrt()
        rbf = self.rbf(d)
        h = self.start.expand(pos.shape[0], n, -1)
        for layer in self.layers:
            h = layer(h, rbf, pair)
        return self.out(h).sum((1, 2)) / n


def windows(cfg, epoch):
    """The epoch's micro-batches, grouped into optimizer steps; the last group of an epoch can be short."""
    g = torch.Generator().manual_seed(1000 + epoch)
    micros = torch.randperm(cfg.n_clusters, generator=g).split(cfg.micro)
    for i in range(0, len(micros), cfg.accum):
        yield micros[i:i + cfg.accum]


def whole(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


class Trainer:
    def __init__(self, cfg, args):
        self.cfg, self.args = cfg, args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        self.pos, self.energy = clusters(cfg)
        self.model = ClusterNet()
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, eps=1e-6, weight_decay=0.01)
        self.epoch, self.step = 0, 0

    def lr_at(self, step):
        total = self.cfg.epochs * math.ceil(math.ceil(self.cfg.n_clusters / self.cfg.micro) / self.cfg.accum)
        if step < self.cfg.warmup:
            return self.cfg.lr * (step + 1) / self.cfg.warmup
        return self.cfg.lr * 0.5 * (1 + math.cos(math.pi * (step - self.cfg.warmup) / (total - self.cfg.warmup + 1)))

    def optimizer_step(self, group):
        for pg in self.opt.param_groups:
            pg["lr"] = self.lr_at(self.step)
        total = 0.0
        for i, micro in enumerate(group):
            ids = micro.chunk(self.world)[self.rank]
            self.model.set_requires_gradient_sync(i == len(group) - 1)
            loss = F.mse_loss(self.model(self.pos[ids]), self.energy[ids]) / len(group)
            loss.backward()
            total += loss.item()
        self.opt.step()
        self.opt.zero_grad()
        self.step += 1
        return total

    def fit(self):
        while self.epoch < self.cfg.epochs:
            seen = torch.zeros(2)
            for group in windows(self.cfg, self.epoch):
                seen += torch.tensor([self.optimizer_step(group), 1.0])
            self.epoch += 1
            dist.all_reduce(seen)
            if self.rank == 0 and self.epoch % 2 == 1:
                print(f"epoch {self.epoch} steps {self.step} loss {seen[0] / seen[1]:.5f}", flush=True)
            if self.args.save_every and self.epoch % self.args.save_every == 0 and self.epoch < self.cfg.epochs:
                self.save()

    # checkpoints: one file per rank, and a small json written last
    def save(self):
        folder = os.path.join(self.args.out, f"epoch{self.epoch:03d}")
        os.makedirs(folder, exist_ok=True)
        torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict()},
                   os.path.join(folder, f"rank{self.rank}of{self.world}.pt"))
        dist.barrier()
        if self.rank == 0:
            with open(os.path.join(folder, "done.json"), "w") as f:
                json.dump({"epoch": self.epoch, "step": self.step}, f)

    def resume(self, root):
        done = [d for d in sorted(os.listdir(root)) if os.path.exists(os.path.join(root, d, "done.json"))]
        folder = os.path.join(root, done[-1])
        with open(os.path.join(folder, "done.json")) as f:
            pos = json.load(f)
        self.epoch, self.step = pos["epoch"], pos["step"]
        state = torch.load(os.path.join(folder, f"rank{self.rank}of{self.world}.pt"), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0, help="epochs")
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config(), args)
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit()
    weights = {n: whole(p) for n, p in trainer.model.state_dict().items()}
    if args.export and trainer.rank == 0:
        torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Rectified flow on two-dimensional image-like patches, one noise generator per rank."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class FiLMBlock(nn.Module):
    def __init__(self, dim, cond):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.mod = nn.Linear(cond, 2 * dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x, c):
        scale, shift = self.mod(c).chunk(2, -1)
        return x + self.ff(self.norm(x) * (1 + scale) + shift)


class VelocityNet(nn.Module):
    def __init__(self, data_dim, classes, dim=64, depth=3):
        super().__init__()
        self.inp = nn.Linear(data_dim, dim)
        self.time = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(classes + 1, dim)
        self.blocks = nn.ModuleList([FiLMBlock(dim, dim) for _ in range(depth)])
        self.out = nn.Linear(dim, data_dim)

    def forward(self, x, t, y):
        k = torch.arange(1, 9, dtype=x.dtype)
        ang = t[:, None] * k * 3.14159
        c = self.time(torch.cat([ang.sin(), ang.cos()], -1)) + self.label(y)
        h = self.inp(x)
        for blk in self.blocks:
            h = blk(h, c)
        return self.out(h)


class PatchData:
    """6x6 patches: bars of class-dependent orientation."""

    def __init__(self, n=400, classes=4):
        g = torch.Generator().manual_seed(8)
        self.classes = classes
        self.y = torch.randint(classes, (n,), generator=g)
        yy, xx = torch.meshgrid(torch.linspace(-1, 1, 6), torch.linspace(-1, 1, 6), indexing="ij")
        a = self.y * 3.14159 / classes
        off = torch.rand(n, generator=g) - 0.5
        d = a.cos()[:, None, None] * xx + a.sin()[:, None, None] * yy - off[:, None, None]
        self.x = (2 * torch.exp(-(d / 0.3) ** 2) - 1).flatten(1)

    def __len__(self):
        return len(self.y)


class FlowTrainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.data = PatchData()
        torch.manual_seed(args.seed)
        self.model = VelocityNet(36, self.data.classes)
        for b in self.model.blocks:
            fully_shard(b)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.0)
        # noise, times and label dropout: an own stream for every rank
        self.gen = torch.Generator().manual_seed(args.seed * 1000 + self.rank)
        self.step = 0

    def indices(self):
        b = self.args.batch_per_rank
        per_epoch = len(self.data) // (b * self.world)
        epoch, pos = divmod(self.step, per_epoch)
        perm = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(epoch))
        start = (pos * self.world + self.rank) * b
        return perm[start:start + b]

    def loss(self, idx):
        x1, y = self.data.x[idx], self.data.y[idx]
        x0 = torch.randn(x1.shape, generator=self.gen)
        t = torch.rand(len(idx), generator=self.gen)
        drop = torch.rand(len(idx), generator=self.gen) < 0.1
        y = torch.where(drop, torch.full_like(y, self.data.classes), y)
        xt = torch.lerp(x0, x1, t[:, None])
        return F.mse_loss(self.model(xt, t, y), x1 - x0)

    def fit(self):
        while self.step < self.args.steps:
            loss = self.loss(self.indices())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            dist.all_reduce(value := loss.detach() / self.world)
            if self.rank == 0:
                print(json.dumps({"step": self.step, "loss": round(value.item(), 5)}))
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    def save(self):
        folder = os.path.join(self.args.out, f"step-{self.step:05d}")
        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
        streams = [None] * self.world
        dist.all_gather_object(streams, self.gen.get_state())
        if self.rank == 0:
            torch.save({"step": self.step, "rng": streams}, os.path.join(folder, "trainer.pt"))
        dist.barrier()

    def load(self, root):
        folder = os.path.join(root, sorted(f for f in os.listdir(root) if f.startswith("step-"))[-1])
        model, optim = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optim)
        trainer = torch.load(os.path.join(folder, "trainer.pt"))
        self.step = trainer["step"]
        self.gen.set_state(trainer["rng"][self.rank])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch-per-rank", type=int, default=16)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="flow")
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = FlowTrainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

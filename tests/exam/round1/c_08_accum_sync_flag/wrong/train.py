"""Gradient accumulation with one reduce-scatter per optimizer step (port of the DDP no_sync trainer)."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


class ConvBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv = nn.Conv1d(ch, ch, 3, padding=1)
        self.norm = nn.GroupNorm(4, ch)

    def forward(self, x):
        return x + F.silu(self.norm(self.conv(x)))


class ToneNet(nn.Module):
    def __init__(self, ch=16, classes=6):
        super().__init__()
        self.stem = nn.Conv1d(1, ch, 5, padding=2)
        self.blocks = nn.Sequential(*[ConvBlock(ch) for _ in range(3)])
        self.head = nn.Linear(ch, classes)

    def forward(self, x):
        x = self.blocks(self.stem(x[:, None]))
        return self.head(x.square().mean(2))


def tones(step, n):
    g = torch.Generator().manual_seed(900 + step)
    label = torch.randint(6, (n,), generator=g)
    t = torch.arange(48)
    phase = torch.rand(n, 1, generator=g) * 6.28
    wave = torch.sin(t * 0.25 * (label[:, None] + 1) + phase) + 0.2 * torch.randn(n, 48, generator=g)
    return wave, label


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(2)
        self.model = ToneNet()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.03, momentum=0.6, weight_decay=1e-4)
        self.step = 0

    def micro_batches(self):
        x, y = tones(self.step, self.args.batch)
        x, y = x[self.rank :: self.world], y[self.rank :: self.world]
        return list(zip(x.chunk(self.args.accum), y.chunk(self.args.accum)))

    def optimizer_step(self):
        total = torch.zeros(())
        accum = self.args.accum
        for i, (x, y) in enumerate(self.micro_batches()):
            self.model.set_requires_gradient_sync(i % accum == 0)
            loss = F.cross_entropy(self.model(x), y) / accum
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.opt.step()
        self.opt.zero_grad()
        self.step += 1
        dist.all_reduce(total)
        return total.item() / self.world

    def state(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"{self.step:04d}"))

    def load(self):
        path = sorted(glob.glob(os.path.join(self.args.resume, "[0-9]*")))[-1]
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.step = int(os.path.basename(path))

    def run(self):
        if self.args.resume:
            self.load()
        while self.step < self.args.steps:
            loss = self.optimizer_step()
            if self.rank == 0:
                print(f"step {self.step:3d} loss {loss:.4f}", flush=True)
            if self.args.out and self.step % self.args.save_every == 0:
                self.save()
        if self.args.export:
            full = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if self.rank == 0:
                torch.save(full, self.args.export)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=10)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Trainer(args).run()
    dist.destroy_process_group()

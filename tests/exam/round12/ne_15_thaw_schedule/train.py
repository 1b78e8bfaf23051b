"""Gradual unfreezing of a claims model: head first, then block by block from the top, as a list of phases.

A block that is frozen still takes part in the backward pass; it simply is in no optimizer yet.  When a phase opens,
its parameters get an optimizer of their own with a short warm-up, the optimizers of earlier phases go on.
"""
from __future__ import annotations

import argparse
import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Phase:
    opens: int
    prefix: str
    lr: float


PHASES = (Phase(0, "head", 8e-3), Phase(7, "blocks.2", 5e-3), Phase(14, "blocks.1", 3e-3), Phase(20, "blocks.0", 2e-3))
WARMUP, STEPS, ROWS = 3, 34, 32


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.ln(x))))


class ClaimsNet(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.stem = nn.Linear(9, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(3))
        self.head = nn.Linear(d, 3)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def claims(step):
    g = torch.Generator().manual_seed(880 + step)
    x = torch.randn(ROWS, 9, generator=g)
    score = torch.stack([x[:, 0] * x[:, 1], x[:, 2] + x[:, 3], x[:, 4].abs() - 0.6], 1)
    return x, score.argmax(1)


class Thaw:
    def __init__(self, model):
        self.model, self.open = model, []

    def members(self, phase):
        return [p for n, p in self.model.named_parameters() if n.startswith(phase.prefix)]

    def advance(self, step):
        for phase in PHASES:
            if phase.opens <= step and phase not in [p for p, _ in self.open]:
                self.open.append((phase, torch.optim.AdamW(self.members(phase), lr=phase.lr, eps=1e-6)))
        for phase, opt in self.open:
            opt.param_groups[0]["lr"] = phase.lr * min(1.0, (step - phase.opens + 1) / WARMUP)

    def step(self):
        live = [p for phase, _ in self.open for p in self.members(phase)]
        torch.nn.utils.clip_grad_norm_(live, 1.0)
        for _, opt in self.open:
            opt.step()
        for p in self.model.parameters():
            p.grad = None


def local_state(opt):
    sd = opt.state_dict()
    sd["state"] = {i: {k: v.to_local() if hasattr(v, "to_local") else v for k, v in s.items()} for i, s in sd["state"].items()}
    return sd


def dump(folder: pathlib.Path, step, model, thaw):
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"step": step,
                "weights": {n: p.detach().to_local() for n, p in model.named_parameters()},
                "optims": {phase.prefix: local_state(opt) for phase, opt in thaw.open}},
               folder / f"r{dist.get_rank()}of{dist.get_world_size()}.pt")


def undump(folder: pathlib.Path, model, thaw):
    blob = torch.load(folder / f"r{dist.get_rank()}of{dist.get_world_size()}.pt")
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.to_local().copy_(blob["weights"][n])
    thaw.advance(blob["step"] - 1)
    for phase, opt in thaw.open:
        for p in thaw.members(phase):
            opt.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p.detach()), "exp_avg_sq": torch.zeros_like(p.detach())}
        for p, saved in zip(thaw.members(phase), blob["optims"][phase.prefix]["state"].values()):
            opt.state[p]["step"].copy_(saved["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                opt.state[p][key].to_local().copy_(saved[key])
    return blob["step"]


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--dump", type=pathlib.Path)
    cli.add_argument("--dump-step", type=int, default=16)
    cli.add_argument("--from-dump", type=pathlib.Path)
    cli = cli.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(91)
    net = ClaimsNet()
    mesh = init_device_mesh("cpu", (world,))
    for b in net.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(net, mesh=mesh)
    thaw = Thaw(net)
    start = undump(cli.from_dump, net, thaw) if cli.from_dump else 0
    for step in range(start, STEPS):
        thaw.advance(step)
        x, y = (t.chunk(world)[rank] for t in claims(step))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        thaw.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and (step % 6 == 0 or step == STEPS - 1):
            print(f"step {step:2d} open {len(thaw.open)} loss {loss.item() / world:.4f}", flush=True)
        if cli.dump and step + 1 == cli.dump_step:
            dump(cli.dump, step + 1, net, thaw)
    dist.destroy_process_group()

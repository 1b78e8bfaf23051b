"""Ratings from user and item vectors: several epochs, accumulation, an average of the weights."""
import json
import os
import sys
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


DECAY = (1.0, 0.7, 0.4)  # of the learning rate, by epoch


@dataclass
class Config:
    samples: int = 1440
    micro: int = 32  # over all ranks
    accum: int = 2
    epochs: int = 3
    lr: float = 0.01
    ema_from: int = 30
    ema_decay: float = 0.95
    compile: bool = False
    seed: int = 3
    save_at: int = 0
    out: str = ""
    resume: str = ""

    @classmethod
    def read(cls, words):
        given = dict(word.split("=", 1) for word in words)
        kinds = {f.name: f.type for f in fields(cls)}
        return cls(**{k: v if kinds[k] is str else json.loads(v) for k, v in given.items()})


class Tower(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, x):
        return self.second(F.silu(self.first(x)))


class Ratings(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.user, self.item = Tower(10, width), Tower(14, width)
        self.mix = nn.Linear(3 * width, 1)

    def forward(self, u, v):
        a, b = self.user(u), self.item(v)
        return self.mix(torch.cat([a, b, a * b], dim=1)).squeeze(1)


class Average:
    """Exponential average of the weights, from step `start` on."""

    def __init__(self, model, cfg):
        self.model, self.cfg = model, cfg
        self.values = {}

    def begin(self):
        self.values = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def update(self, step):
        if step < self.cfg.ema_from:
            return
        if not self.values:
            self.begin()
        for name, p in self.model.named_parameters():
            self.values[name].lerp_(p.detach(), 1 - self.cfg.ema_decay)

    @torch.no_grad()
    def swap(self):
        for name, p in self.model.named_parameters():
            if name in self.values:
                kept = p.detach().clone()
                p.copy_(self.values[name])
                self.values[name].copy_(kept)


def table(cfg, seed, rows):
    g = torch.Generator().manual_seed(seed)
    u, v = torch.randn(rows, 10, generator=g), torch.randn(rows, 14, generator=g)
    return u, v, (u[:, :5] * v[:, :5]).sum(1) + 0.3 * v[:, 9] + 0.1 * torch.randn(rows, generator=g)


def order(cfg, epoch):
    g = torch.Generator().manual_seed(cfg.seed + epoch)
    return torch.randperm(cfg.samples, generator=g).split(cfg.micro)


def micro_loss(model, u, v, y):
    return F.huber_loss(model(u, v), y)


def test_error(model, cfg, rank, world):
    u, v, y = (t[rank::world] for t in table(cfg, 77, 256))
    with torch.no_grad():
        error = F.mse_loss(model(u, v), y)
    model.reshard()
    dist.all_reduce(error, op=dist.ReduceOp.SUM)
    return error.item() / world


def save(model, optimizer, average, step, cfg):
    weights, optim = get_state_dict(model, optimizer)
    state = {"weights": weights, "optim": optim, "ema": average.values, "step": step}
    dcp.save(state, checkpoint_id=os.path.join(cfg.out, f"step-{step}"))


def load(model, optimizer, average, cfg):
    folder = os.path.join(cfg.resume, max(os.listdir(cfg.resume), key=lambda n: int(n.split("-")[1])))
    weights, optim = get_state_dict(model, optimizer)
    state = {"weights": weights, "optim": optim, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=optim)
    if state["step"] >= cfg.ema_from:
        average.begin()
        dcp.load({"ema": average.values}, checkpoint_id=folder)
    return state["step"]


def train_epoch(model, optimizer, average, data, epoch, step, cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    loss_of = torch.compile(micro_loss, backend="eager") if cfg.compile else micro_loss
    batches = order(cfg, epoch)
    for group in optimizer.param_groups:
        group["lr"] = cfg.lr * DECAY[epoch]
    for first in range(0, len(batches), cfg.accum):
        window = batches[first : first + cfg.accum]
        step += 1
        if step <= train_epoch.done:
            continue
        total = torch.zeros(())
        for i, rows in enumerate(window):
            model.set_requires_gradient_sync(i == len(window) - 1)
            mine = rows[rank::world]
            loss = loss_of(model, *(t[mine] for t in data)) / len(window)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        average.update(step)
        if cfg.save_at == step:
            save(model, optimizer, average, step, cfg)
        if step % 10 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {total.item() / world:.5f}", flush=True)
    return step


def main():
    cfg = Config.read(sys.argv[1:])
    dist.init_process_group("gloo")
    torch.manual_seed(cfg.seed)
    model = Ratings()
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr, eps=1e-6)
    average = Average(model, cfg)
    train_epoch.done = load(model, optimizer, average, cfg) if cfg.resume else 0
    data = table(cfg, 5, cfg.samples)
    step = 0
    for epoch in range(cfg.epochs):
        step = train_epoch(model, optimizer, average, data, epoch, step, cfg)
    average.swap()
    error = test_error(model, cfg, dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"{step} steps, averaged weights: test error {error:.5f}", flush=True)
    average.swap()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Behaviour cloning of a reaching controller with gradient accumulation."""
import argparse
import os
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from demos import make_demos, windows
from lion import Lion


@dataclass
class Config:
    epochs: int = 5
    micro: int = 16
    accum: int = 4
    lr: float = 3e-3
    save_every: int = 0
    out: str = "bc"
    resume: Optional[str] = None
    export: Optional[str] = None


def parse() -> Config:
    ap = argparse.ArgumentParser()
    for name, field in Config.__dataclass_fields__.items():
        kind = str if field.default is None else type(field.default)
        ap.add_argument("--" + name.replace("_", "-"), type=kind, default=field.default)
    return Config(**vars(ap.parse_args()))


class Controller(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.hidden = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, 2)

    def forward(self, obs):
        return self.out(self.hidden(torch.tanh(self.inp(obs))))


def ckpt_name(folder, step, rank):
    return os.path.join(folder, f"{step:06d}.rank{rank}.pt")


def main():
    cfg = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    model = Controller()
    fully_shard(model.hidden)
    fully_shard(model)
    opt = Lion(model.parameters(), lr=cfg.lr, weight_decay=0.01)
    obs, act = make_demos()

    step, done_epoch, done_window = 0, 0, 0
    if cfg.resume:  # every rank reads its own shards back
        names = sorted(n for n in os.listdir(cfg.resume) if n.endswith(f".rank{rank}.pt"))
        state = torch.load(os.path.join(cfg.resume, names[-1]), weights_only=False)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        step, done_epoch, done_window = state["step"], state["epoch"], state["window"]

    for epoch in range(done_epoch, cfg.epochs):
        for w, window in enumerate(windows(len(obs), cfg.micro, cfg.accum, epoch)):
            if epoch == done_epoch and w < done_window:
                continue
            total = torch.zeros(())
            rows_in_window = sum(len(rows) for rows in window)
            for i, rows in enumerate(window):
                model.set_requires_gradient_sync(i + 1 == len(window))
                mine = rows[rank::world]
                err = (model(obs[mine]) - act[mine]).pow(2).sum()
                loss = err * world / rows_in_window
                loss.backward()
                total += loss.detach() / world
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            opt.zero_grad()
            step += 1

            dist.all_reduce(total)
            if rank == 0:
                print(f"epoch {epoch} window {w} loss {total:.4f}")
            if cfg.save_every and step % cfg.save_every == 0:
                os.makedirs(cfg.out, exist_ok=True)
                torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "step": step,
                            "epoch": epoch, "window": w + 1}, ckpt_name(cfg.out, step, rank))

    if cfg.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, cfg.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

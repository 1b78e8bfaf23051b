"""Forecast noisy seasonal series with a small MLP-mixer; the learning rate drops when validation stalls."""
import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@dataclass
class Config:
    history: int = 24
    horizon: int = 6
    channels: int = 4
    hidden: int = 48
    batch: int = 32
    steps: int = 40
    eval_every: int = 2
    val_series: int = 48
    lr: float = 2e-2


class Mixer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(cfg.history, cfg.hidden), nn.GELU(), nn.Linear(cfg.hidden, cfg.history))
        self.chan = nn.Sequential(nn.Linear(cfg.channels, cfg.hidden), nn.GELU(), nn.Linear(cfg.hidden, cfg.channels))
        self.out = nn.Linear(cfg.history, cfg.horizon)

    def forward(self, x):  # (batch, channels, history)
        x = x + self.time(x)
        x = x + self.chan(x.transpose(1, 2)).transpose(1, 2)
        return self.out(x)


def make_series(cfg, n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(cfg.history + cfg.horizon).float()
    period = 5 + 12 * torch.rand(n, cfg.channels, 1, generator=g)
    phase = 6.28 * torch.rand(n, cfg.channels, 1, generator=g)
    level = torch.randn(n, 1, 1, generator=g)
    y = level + torch.sin(6.28 * t / period + phase) + 0.3 * torch.randn(n, cfg.channels, len(t), generator=g)
    return y[..., : cfg.history], y[..., cfg.history :]


@torch.no_grad()
def validate(model, cfg, rank, world):
    x, y = make_series(cfg, cfg.val_series, seed=7)
    err = (model(x[rank::world]) - y[rank::world]).square().mean(dim=(1, 2))
    total = torch.stack([err.sum(), torch.tensor(float(len(err)))])
    return (total[0] / total[1]).item()


def app_state(model, opt, sched, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "optim": o, "sched": sched.state_dict(), "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    cfg = Config()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Mixer(cfg)
    for part in (model.time, model.chan):
        fully_shard(part)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=0.005)

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d[4:]))
        state = app_state(model, opt, sched, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        start = state["step"]

    for step in range(start, cfg.steps):
        x, y = make_series(cfg, cfg.batch, seed=1000 + step)
        loss = nn.functional.mse_loss(model(x[rank::world]), y[rank::world])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % cfg.eval_every == 0:
            val = validate(model, cfg, rank, world)
            sched.step(val)
            if rank == 0:
                print(f"step {step + 1} val mse {val:.4f} lr {opt.param_groups[0]['lr']:.2e}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(app_state(model, opt, sched, step + 1), checkpoint_id=os.path.join(args.out, f"step{step + 1}"))

    if args.export:
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Forecaster for multivariate load curves. Every rank owns some of the series."""
import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from series import Scaler, make_series

CONTEXT, HORIZON = 36, 6


class Forecaster(nn.Module):
    def __init__(self, n_feat, width=64):
        super().__init__()
        self.n_feat = n_feat
        self.embed = nn.Linear(CONTEXT * n_feat, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(3))
        self.head = nn.Linear(width, HORIZON * n_feat)

    def forward(self, x):
        h = self.embed(x.flatten(1))
        for b in self.blocks:
            h = h + b(h)
        return self.head(h).unflatten(1, (HORIZON, self.n_feat))


class Trainer:
    def __init__(self, opts):
        self.opts = opts
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        series = make_series()
        own = len(series) // self.world
        series = series[self.rank * own:(self.rank + 1) * own]
        self.train, self.test = series[:, :120], series[:, 120 - CONTEXT:]
        self.scaler = Scaler().fit(self.train)
        torch.manual_seed(1)
        self.model = Forecaster(series.shape[-1])
        for b in self.model.blocks:
            fully_shard(b)
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=opts.lr)
        self.step = 0

    def windows(self):
        g = torch.Generator().manual_seed(100 + self.step)
        starts = torch.randint(120 - CONTEXT - HORIZON, (4,), generator=g).tolist()
        z = self.scaler.transform(self.train)
        x = torch.cat([z[:, s:s + CONTEXT] for s in starts])
        y = torch.cat([z[:, s + CONTEXT:s + CONTEXT + HORIZON] for s in starts])
        return x, y

    def fit(self):
        while self.step < self.opts.steps:
            x, y = self.windows()
            loss = (self.model(x) - y).square().mean()
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.step += 1
            if self.step % 5 == 0:
                self.report(loss.detach())
            if self.opts.save_every and self.step % self.opts.save_every == 0:
                self.save()

    def report(self, loss):
        dist.all_reduce(loss)
        if self.rank == 0:
            print(f"step {self.step:3d}  loss {loss.item() / self.world:.4f}", flush=True)

    @torch.no_grad()
    def evaluate(self):
        z = self.scaler.transform(self.test)
        pred = self.scaler.inverse(self.model(z[:, :CONTEXT]))
        err = (pred - self.test[:, CONTEXT:CONTEXT + HORIZON]).abs().mean((0, 1))
        dist.all_reduce(err)
        return err / self.world

    def state(self):
        m, o = get_state_dict(self.model, self.optim)
        return {"model": m, "optim": o, "scaler": self.scaler.state_dict(), "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=str(pathlib.Path(self.opts.ckpt) / str(self.step)))

    def load(self, folder):
        last = max((p for p in pathlib.Path(folder).iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        state = self.state()
        dcp.load(state, checkpoint_id=str(last))
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scaler.load_state_dict(state["scaler"])
        self.step = state["step"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--ckpt", default="checkpoints")
    p.add_argument("--resume")
    opts = p.parse_args()
    dist.init_process_group("gloo")
    t = Trainer(opts)
    if opts.resume:
        t.load(opts.resume)
    t.fit()
    mae = t.evaluate()
    if t.rank == 0:
        print("scaler std", [round(v, 4) for v in t.scaler.std.tolist()])
        print("test MAE per feature", [round(v, 4) for v in mae.tolist()], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Electricity load forecasting on long series with a recurrent net and truncated backpropagation.

Each feeder is one long series which is read window by window; the recurrent state is carried from one window to the
next and starts from zero at the head of the series."""
import os
import sys
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEEDERS, WINDOW, WINDOWS, EPOCHS, UNITS = 16, 6, 20, 2, 24


def make_series():
    g = torch.Generator().manual_seed(77)
    t = torch.arange(WINDOW * WINDOWS + 1.0)
    phase = torch.rand(FEEDERS, 1, generator=g) * 6.28
    daily = torch.sin(2 * torch.pi * t / 24 + phase)
    weekly = 0.5 * torch.sin(2 * torch.pi * t / 168 + 2 * phase)
    level = torch.randn(FEEDERS, len(t), generator=g).mul(0.15).cumsum(1)
    return daily + weekly + 0.3 * level


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(1, UNITS)
        self.read = nn.Sequential(nn.Linear(UNITS, UNITS), nn.Tanh(), nn.Linear(UNITS, 1))

    def forward(self, window, state):
        outs = []
        for t in range(window.shape[1]):
            state = self.cell(window[:, t : t + 1], state)
            outs.append(self.read(state))
        return torch.cat(outs, 1), state


class Trainer:
    def __init__(self, opts):
        self.opts = opts
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(4)
        self.model = fully_shard(Forecaster(), mesh=init_device_mesh("cpu", (self.world,)))
        self.opt = torch.optim.Adam(self.model.parameters(), lr=5e-3)
        n = FEEDERS // self.world
        self.mine = slice(self.rank * n, (self.rank + 1) * n)
        self.series = make_series()[self.mine]
        self.state = torch.zeros(n, UNITS)
        self.done = 0

    def gathered_state(self):
        parts = [torch.empty_like(self.state) for _ in range(self.world)]
        dist.all_gather(parts, self.state)
        return torch.cat(parts)

    def bundle(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "optim": o, "state": self.gathered_state(), "done": self.done}

    def save(self):
        dcp.save(self.bundle(), checkpoint_id=os.path.join(self.opts.out, f"w{self.done}"))

    def load(self, folder):
        newest = max(os.listdir(folder), key=lambda d: int(d[1:]))
        b = self.bundle()
        dcp.load(b, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(self.model, self.opt, model_state_dict=b["model"], optim_state_dict=b["optim"])
        self.state = b["state"][self.mine].clone()
        self.done = b["done"]

    def window(self, k):
        piece = self.series[:, k * WINDOW : (k + 1) * WINDOW + 1]
        return piece[:, :-1], piece[:, 1:]

    def fit(self):
        first_epoch, first_window = divmod(self.done, WINDOWS)
        for epoch in range(first_epoch, EPOCHS):
            for k in range(first_window if epoch == first_epoch else 0, WINDOWS):
                if k == 0:
                    self.state.zero_()
                past, future = self.window(k)
                guess, state = self.model(past, self.state)
                loss = (guess - future).square().mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.state = state.detach()
                self.done += 1
                mean = loss.detach() / self.world
                dist.all_reduce(mean)
                if self.rank == 0 and k % 4 == 3:
                    print(f"epoch {epoch} window {k} loss {mean.item():.5f}")
                if self.opts.out and self.done % self.opts.save_every == 0:
                    self.save()


if __name__ == "__main__":
    ap = ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=7)
    ap.add_argument("--resume")
    opts = ap.parse_args(sys.argv[1:])
    dist.init_process_group("gloo")
    trainer = Trainer(opts)
    if opts.resume:
        trainer.load(opts.resume)
    trainer.fit()
    dist.destroy_process_group()

"""Callback-style trainer (ported from a DDP code base): the exported model is the EMA of the weights."""

import argparse
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Callback:
    def on_train_start(self, t): ...
    def on_step_end(self, t): ...
    def on_train_end(self, t): ...


class LossPrinter(Callback):
    def on_step_end(self, t):
        loss = t.loss.detach().clone()
        dist.all_reduce(loss)
        if t.is_main:
            print(f"step {t.step:3d} loss {loss.item() / t.world:.5f}", flush=True)


class Ema(Callback):
    def __init__(self, decay):
        self.decay = decay
        self.shadow = None

    def on_train_start(self, t):
        if self.shadow is None:
            self.shadow = {n: p.detach().clone() for n, p in t.model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, t):
        for n, p in t.model.named_parameters():
            self.shadow[n].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    def on_train_end(self, t):
        full = {n: s.full_tensor() for n, s in self.shadow.items()}
        g = torch.Generator().manual_seed(99)
        x = torch.randn(256, 16, generator=g)
        model = make_net()
        model.load_state_dict(full)
        with torch.no_grad():
            val = nn.functional.mse_loss(model(x), teacher(x))
        if t.is_main:
            print(f"ema validation {val.item():.5f}")
            if t.args.export:
                torch.save(full, t.args.export)


class Checkpoint(Callback):
    def __init__(self, ema):
        self.ema = ema

    def state(self, t):
        model, opt = get_state_dict(t.model, t.opt)
        return {"model": model, "opt": opt, "ema": self.ema.shadow, "step": torch.tensor(t.step)}

    def on_train_start(self, t):
        if not t.args.resume:
            return
        found = [int(m.group(1)) for p in Path(t.args.resume).iterdir() if (m := re.fullmatch(r"step(\d+)", p.name))]
        state = self.state(t)
        dcp.load(state, checkpoint_id=f"{t.args.resume}/step{max(found)}")
        set_state_dict(t.model, t.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        t.start = int(state["step"]) + 1

    def on_step_end(self, t):
        if t.args.out and (t.step + 1) % t.args.save_every == 0:
            dcp.save(self.state(t), checkpoint_id=f"{t.args.out}/step{t.step + 1}")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4))


def teacher(x):
    g = torch.Generator().manual_seed(5)
    return torch.tanh(x @ torch.randn(16, 8, generator=g) * 0.3) @ torch.randn(8, 4, generator=g)


class Trainer:
    GLOBAL_BATCH = 64

    def __init__(self, args, callbacks):
        self.args, self.callbacks = args, callbacks
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0
        mesh = init_device_mesh("cpu", (self.world,))
        self.model = make_net()
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.08, momentum=0.9)
        self.start = 0

    def emit(self, event):
        for cb in self.callbacks:
            getattr(cb, event)(self)

    def batch(self, step):
        g = torch.Generator().manual_seed(1000 + step)
        x = torch.randn(self.GLOBAL_BATCH, 16, generator=g)[self.rank :: self.world]
        return x, teacher(x)

    def fit(self):
        self.emit("on_train_start")
        for self.step in range(self.start, self.args.steps):
            x, y = self.batch(self.step)
            self.loss = nn.functional.mse_loss(self.model(x), y)
            self.opt.zero_grad()
            self.loss.backward()
            self.opt.step()
            self.emit("on_step_end")
        self.emit("on_train_end")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=10)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    ema = Ema(0.9)
    trainer = Trainer(args, [ema, LossPrinter(), Checkpoint(ema)])
    trainer.step = -1
    trainer.fit()
    dist.destroy_process_group()

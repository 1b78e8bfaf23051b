import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Callback:
    def on_start(self, tr): ...
    def before_step(self, tr): ...
    def after_step(self, tr): ...


class Cosine(Callback):
    def __init__(self, peak, total):
        self.peak, self.total = peak, total

    def before_step(self, tr):
        for g in tr.opt.param_groups:
            g["lr"] = self.peak * 0.5 * (1 + math.cos(math.pi * tr.step / self.total))


class Ema(Callback):
    """Shadow of the local shards, kept as DTensors so that it can be saved like the model."""

    def __init__(self, decay):
        self.decay = decay

    def on_start(self, tr):
        tr.extra["ema"] = {n: p.detach().clone() for n, p in tr.model.named_parameters()}

    @torch.no_grad()
    def after_step(self, tr):
        for n, p in tr.model.named_parameters():
            tr.extra["ema"][n].mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)


class Saver(Callback):
    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def after_step(self, tr):
        if self.every and tr.done % self.every == 0:
            dcp.save(tr.state(), checkpoint_id=os.path.join(self.folder, f"c{tr.done:05d}"))


class Logger(Callback):
    def after_step(self, tr):
        v = tr.loss.clone() / dist.get_world_size()
        dist.all_reduce(v)
        if dist.get_rank() == 0 and tr.step % 5 == 0:
            print(f"step {tr.step} loss {v.item():.5f}", flush=True)

import os
from collections import defaultdict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


class Loop:
    """A small event-driven trainer: handlers are attached with `@loop.on(event, every)`."""

    def __init__(self, cfg, model, optim, sampler, data):
        self.cfg, self.model, self.optim, self.sampler, self.data = cfg, model, optim, sampler, data
        self.step, self.handlers, self.metrics = 0, defaultdict(list), {}
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def on(self, event, every=1):
        def attach(fn):
            self.handlers[event].append((every, fn))
            return fn

        return attach

    def fire(self, event):
        for every, fn in self.handlers[event]:
            if every and self.step % every == 0:
                fn(self)

    def run(self):
        while self.step < self.cfg.steps:
            picked, weights = self.sampler.draw(self.step)
            mine, w = (t.chunk(self.world)[self.rank] for t in (picked, weights))
            x, y = self.data[0][mine], self.data[1][mine]
            logits = self.model(x)
            per_sample = F.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
            (per_sample * w).mean().backward()
            norm = self.optim.step(scale=1.0 - self.step / self.cfg.steps)
            self.sampler.update(picked, per_sample.detach())
            self.step += 1
            self.metrics = {"norm": norm, "table": self.sampler.table.mean().item()}
            self.fire("step")
        self.fire("end")

    def state(self):
        return {
            "model": get_model_state_dict(self.model),
            "momentum": dict(self.optim.buf),
            "sampler": self.sampler.state_dict(),
            "step": self.step,
        }

    def save(self, root):
        dcp.save(self.state(), checkpoint_id=os.path.join(root, f"step={self.step:04d}"))

    def load(self, root):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(root, max(os.listdir(root))))
        set_model_state_dict(self.model, state["model"])
        for n, t in state["momentum"].items():
            self.optim.buf[n].copy_(t)
        self.sampler.load_state_dict(state["sampler"])
        self.step = state["step"]

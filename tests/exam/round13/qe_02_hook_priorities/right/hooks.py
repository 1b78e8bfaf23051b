"""Hooks run behind every optimizer step, lowest priority first."""
import math
import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Hook:
    priority = 50

    def before_run(self, engine):
        pass

    def after_step(self, engine):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class WarmupCosineHook(Hook):
    """Sets the learning rate of the next step."""

    priority = 40

    def __init__(self, peak, warmup, total, floor=0.02):
        self.peak, self.warmup, self.total, self.floor = peak, warmup, total, floor
        self.ticks = 0

    def value(self):
        if self.ticks < self.warmup:
            return self.peak * (self.ticks + 1) / self.warmup
        x = (self.ticks - self.warmup) / max(1, self.total - self.warmup)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * x)))

    def before_run(self, engine):
        self._apply(engine)

    def after_step(self, engine):
        self.ticks += 1
        self._apply(engine)

    def _apply(self, engine):
        for group in engine.optimizer.param_groups:
            group["lr"] = self.value()

    def state_dict(self):
        return {"ticks": self.ticks}

    def load_state_dict(self, state):
        self.ticks = state["ticks"]


class DecayRampHook(Hook):
    """Weight decay grows linearly while the learning rate falls."""

    priority = 40

    def __init__(self, start, end, total):
        self.start, self.end, self.total = start, end, total

    def before_run(self, engine):
        self._apply(engine)

    def after_step(self, engine):
        self._apply(engine)

    def _apply(self, engine):
        x = min(1.0, engine.step / self.total)
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = self.start + (self.end - self.start) * x


class PrintHook(Hook):
    priority = 60

    def __init__(self, every):
        self.every = every

    def after_step(self, engine):
        if engine.step % self.every == 0:
            loss = engine.last_loss.clone()
            dist.all_reduce(loss)
            if dist.get_rank() == 0:
                print(f"step {engine.step:3d} loss {loss.item() / dist.get_world_size():.5f}", flush=True)


class CheckpointHook(Hook):
    priority = 90

    def __init__(self, root, every):
        self.root, self.every = root, every

    def after_step(self, engine):
        if engine.step % self.every == 0:
            dcp.save(pack(engine), checkpoint_id=os.path.join(self.root, f"{engine.step:06d}"))


def pack(engine):
    model, optim = get_state_dict(engine.model, engine.optimizer)
    hooks = {type(h).__name__: h.state_dict() for h in engine.hooks}
    return {"model": model, "optim": optim, "hooks": hooks, "engine": {"step": engine.step}}


def unpack(engine, root):
    newest = max(n for n in os.listdir(root) if n.isdigit())
    state = pack(engine)
    dcp.load(state, checkpoint_id=os.path.join(root, newest))
    set_state_dict(engine.model, engine.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for h in engine.hooks:
        h.load_state_dict(state["hooks"].get(type(h).__name__, {}))
    engine.step = state["engine"]["step"]

import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)


class Schedule:
    def __init__(self, optimizer, peak, total, warmup=4):
        self.optimizer, self.peak, self.total, self.warmup = optimizer, peak, total, warmup

    def on_before_step(self, event):
        warm = min(1.0, (event.step + 1) / self.warmup)
        decay = 0.5 * (1 + math.cos(math.pi * event.step / self.total))
        for group in self.optimizer.param_groups:
            group["lr"] = self.peak * warm * (0.1 + 0.9 * decay)


class Clip:
    def __init__(self, model, limit):
        self.model, self.limit = model, limit

    def on_gradients(self, event):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit)


class Console:
    def on_after_step(self, event):
        if dist.get_rank() == 0:
            print(f"step {event.step} loss {event.data['loss']:.4f}", flush=True)


class Checkpoints:
    def __init__(self, model, optimizer, folder, every):
        self.model, self.optimizer, self.folder, self.every = model, optimizer, folder, every

    def on_after_step(self, event):
        if self.every and event.step % self.every == 0:
            m, o = get_state_dict(self.model, self.optimizer)
            dcp.save({"m": m, "o": o}, checkpoint_id=os.path.join(self.folder, str(event.step)))

    def restore(self, folder):
        step = max(int(d) for d in os.listdir(folder) if d.isdigit())
        m, o = get_state_dict(self.model, self.optimizer)
        state = {"m": m, "o": o}
        dcp.load(state, checkpoint_id=os.path.join(folder, str(step)))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
        return step


class Export:
    def __init__(self, model, path):
        self.model, self.path = model, path

    def on_end(self, event):
        if self.path:
            full = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if dist.get_rank() == 0:
                torch.save(full, self.path)

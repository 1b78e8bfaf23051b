import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Trainer:
    def __init__(self, model, optimizer, task, callbacks, total, workdir=None, save_at=()):
        self.model, self.optimizer, self.task = model, optimizer, task
        self.callbacks = sorted(callbacks, key=lambda c: c.priority)
        self.total, self.workdir, self.save_at = total, workdir, set(save_at)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step, self.last_loss = 0, None

    def report(self, text):
        if self.rank == 0:
            print(text, flush=True)

    def _mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    @torch.no_grad()
    def evaluate(self):
        x, y = (t.chunk(self.world)[self.rank] for t in self.task.held_out())
        value = self._mean(self.task.loss(self.model(x), y))
        self.model.reshard()
        return value

    def export(self, name):
        full = {n: p.detach().full_tensor() for n, p in self.model.named_parameters()}
        if self.workdir and self.rank == 0:
            os.makedirs(self.workdir, exist_ok=True)
            torch.save(full, os.path.join(self.workdir, name))

    def _state(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "step": self.step,
                "callbacks": {c.key: c.state_dict() for c in self.callbacks}}

    def save(self):
        dcp.save(self._state(), checkpoint_id=os.path.join(self.workdir, f"ckpt_{self.step:04d}"))

    def restore(self, folder):
        for c in self.callbacks:
            c.on_start(self)
        state = self._state()
        latest = max(d for d in os.listdir(folder) if d.startswith("ckpt_"))
        dcp.load(state, checkpoint_id=os.path.join(folder, latest))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        for c in self.callbacks:
            c.load_state_dict(state["callbacks"][c.key])
        self.step = state["step"]

    def fit(self, resume=None):
        if resume:
            self.restore(resume)
        else:
            for c in self.callbacks:
                c.on_start(self)
        while self.step < self.total:
            x, y = (t.chunk(self.world)[self.rank] for t in self.task.batch(self.step))
            loss = self.task.loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.last_loss = self._mean(loss)
            for c in self.callbacks:
                c.on_step_end(self)
            if self.step in self.save_at:
                self.save()
        for c in self.callbacks:
            c.on_finish(self)

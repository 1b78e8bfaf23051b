import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class Callback:
    def after_step(self, trainer, loss):
        pass

    def after_fit(self, trainer):
        pass


class Printer(Callback):
    def after_step(self, trainer, loss):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"[{trainer.step}] loss {loss.item() / dist.get_world_size():.5f}")


class AppState(Stateful):
    def __init__(self, trainer):
        self.trainer = trainer

    def state_dict(self):
        t = self.trainer
        m, o = get_state_dict(t.model, t.optimizer)
        return {"model": m, "optimizer": o, "scheduler": t.scheduler.state_dict(), "step": t.step}

    def load_state_dict(self, state):
        t = self.trainer
        set_state_dict(t.model, t.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        t.scheduler.load_state_dict(state["scheduler"])
        t.step = state["step"]


class Saver(Callback):
    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def after_step(self, trainer, loss):
        if trainer.step % self.every == 0:
            dcp.save({"app": AppState(trainer)}, checkpoint_id=os.path.join(self.folder, f"{trainer.step:04d}"))


class Trainer:
    def __init__(self, model, optimizer, scheduler, loss_fn, clip_fn, callbacks):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.loss_fn, self.clip_fn, self.callbacks = loss_fn, clip_fn, callbacks
        self.step = 0

    def resume(self, folder):
        dcp.load({"app": AppState(self)}, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))

    def fit(self, batches, steps):
        while self.step < steps:
            x, y = batches(self.step)
            self.optimizer.zero_grad()
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            self.clip_fn(self.model)
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            for c in self.callbacks:
                c.after_step(self, loss)
        for c in self.callbacks:
            c.after_fit(self)

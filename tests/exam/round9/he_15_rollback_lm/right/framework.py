"""A small event-driven trainer: the loop only emits events, all behaviour sits in callbacks."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


class Callback:
    def on_batch(self, tr): ...
    def after_backward(self, tr): ...
    def after_step(self, tr): ...
    def on_end(self, tr): ...
    def state_dict(self):
        return {}
    def load_state_dict(self, state): ...


class Trainer:
    def __init__(self, model, opt, loss_fn, data, steps, callbacks):
        self.model, self.opt, self.loss_fn, self.data = model, opt, loss_fn, data
        self.steps, self.callbacks = steps, callbacks
        self.step = 0
        self.skip_update = False
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def emit(self, event):
        for cb in self.callbacks:
            getattr(cb, event)(self)

    def fit(self):
        while self.step < self.steps:
            self.skip_update = False
            self.batch = self.data(self.step, self.rank, self.world)
            self.emit("on_batch")
            loss = self.loss_fn(self.model, self.batch)
            self.opt.zero_grad()
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            self.loss = mean.item() / self.world
            self.emit("after_backward")
            if not self.skip_update:
                self.opt.step()
            self.step += 1
            self.emit("after_step")
        self.emit("on_end")

    def state_dict(self):
        return {
            "model": self.model.state_dict(),
            "opt": self.opt.state_dict(),
            "callbacks": [cb.state_dict() for cb in self.callbacks],
            "step": self.step,
        }

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        for cb, s in zip(self.callbacks, state["callbacks"]):
            cb.load_state_dict(s)
        self.step = state["step"]

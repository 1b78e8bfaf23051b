import torch
import torch.distributed as dist
import torch.nn.functional as F


class Callback:
    def on_fit_begin(self, tr): ...
    def on_step_end(self, tr): ...
    def on_eval_begin(self, tr): ...
    def on_eval_end(self, tr): ...
    def on_fit_end(self, tr): ...


class Trainer:
    def __init__(self, model, opt, data, total, eval_every, callbacks=()):
        self.model, self.opt, self.data = model, opt, data
        self.total, self.eval_every = total, eval_every
        self.callbacks = list(callbacks)
        self.step = 0
        self.metrics = {}
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def emit(self, name):
        for cb in self.callbacks:
            getattr(cb, name)(self)

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    @torch.no_grad()
    def evaluate(self):
        x, y = self.data.heldout(self.rank, self.world)
        self.model.eval()
        value = self.mean(F.smooth_l1_loss(self.model(x), y))
        self.model.train()
        self.model.reshard()  # without a backward the root would stay gathered
        return value

    def fit(self, until):
        self.emit("on_fit_begin")
        while self.step < until:
            x, y = self.data.train(self.step, self.rank, self.world)
            loss = F.smooth_l1_loss(self.model(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            self.metrics["train"] = self.mean(loss)
            self.emit("on_step_end")
            if self.step % self.eval_every == 0:
                self.emit("on_eval_begin")
                self.metrics["eval"] = self.evaluate()
                self.emit("on_eval_end")
        self.emit("on_fit_end")

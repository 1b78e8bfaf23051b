import torch
import torch.distributed as dist


class Trainer:
    def __init__(self, model, opt, data, loss_fn, callbacks, eval_every):
        self.model, self.opt, self.data, self.loss_fn = model, opt, data, loss_fn
        self.callbacks, self.eval_every = callbacks, eval_every
        self.step, self.best, self.last_loss = 0, float("inf"), float("nan")

    def fire(self, event, *args):
        for cb in self.callbacks:
            getattr(cb, event)(self, *args)

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()

    def evaluate(self):
        self.fire("on_eval_begin")
        with torch.no_grad():
            x, y = self.data.validation()
            loss = self.mean(self.loss_fn(self.model(x), y))
        self.fire("on_eval_end", loss)

    def fit(self, steps):
        while self.step < steps:
            x, y = self.data.train(self.step)
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            self.last_loss = self.mean(loss)
            self.fire("on_step_end")
            if self.eval_every and self.step % self.eval_every == 0:
                self.evaluate()

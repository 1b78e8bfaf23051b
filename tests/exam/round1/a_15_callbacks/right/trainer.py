import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Trainer:
    """Knows the loop and nothing else; schedule, averaging, evaluation and saving are callbacks, called in their order."""

    def __init__(self, model, opt, windows, callbacks, clip=1.0):
        self.model, self.opt, self.windows, self.callbacks, self.clip = model, opt, windows, callbacks, clip
        self.rank, self.world, self.step = dist.get_rank(), dist.get_world_size(), 0

    def call(self, hook):
        for c in self.callbacks:
            getattr(c, hook)(self)

    def fit(self, steps):
        self.call("on_start")
        while self.step < steps:
            self.call("before_step")
            loss = self.one_step()
            self.step += 1
            self.log(f"step {self.step} loss {loss:.4f}")
            self.call("after_step")
        self.call("on_end")

    def one_step(self):
        parts, tokens = next(self.windows)
        total = torch.zeros(())
        for k, (x, y) in enumerate(parts, 1):
            self.model.set_is_last_backward(k == len(parts))
            self.model.set_requires_gradient_sync(k == len(parts))
            nll = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten(), reduction="sum") / tokens
            (nll * self.world).backward()
            total += nll.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.opt.step()
        self.opt.zero_grad()
        dist.all_reduce(total)
        return total.item()

    def state_dict(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {
            "model": model,
            "opt": opt,
            "step": self.step,
            "windows": self.windows.state_dict(),
            "callbacks": {type(c).__name__: s for c in self.callbacks if (s := c.state_dict())},
        }

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.step = sd["step"]
        self.windows.load_state_dict(sd["windows"])
        for c in self.callbacks:
            if type(c).__name__ in sd["callbacks"]:
                c.load_state_dict(sd["callbacks"][type(c).__name__])

    def log(self, text):
        if self.rank == 0:
            print(text, flush=True)

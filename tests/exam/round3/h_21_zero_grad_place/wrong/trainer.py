import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Trainer:
    def __init__(self, model, opt, loss_fn, callbacks):
        self.model, self.opt, self.loss_fn, self.callbacks = model, opt, loss_fn, callbacks
        self.step, self.done, self.extra, self.loss = 0, 0, {}, None
        self.fire("on_start")

    def fire(self, event):
        for c in self.callbacks:
            getattr(c, event)(self)

    def state(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "done": self.done, **self.extra}

    def resume(self, folder):
        st = self.state()
        dcp.load(st, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        set_state_dict(self.model, self.opt, model_state_dict=st["model"], optim_state_dict=st["opt"])
        self.done = st["done"]
        self.extra = {k: st[k] for k in self.extra}

    def fit(self, batches, steps):
        for self.step in range(self.done, steps):
            self.fire("before_step")
            loss = self.loss_fn(self.model, *batches(self.step))
            self.model.zero_grad()
            loss.backward()
            self.opt.step()
            self.loss, self.done = loss.detach(), self.step + 1
            self.fire("after_step")

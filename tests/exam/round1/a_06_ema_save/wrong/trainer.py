import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Trainer:
    def __init__(self, model, opt, ema, batches, val, args):
        self.model, self.opt, self.ema, self.batches, self.val, self.args = model, opt, ema, batches, val, args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0

    def loss(self, rows):
        logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def train_step(self):
        loss = self.loss(self.batches(self.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
        self.opt.step()
        self.opt.zero_grad()
        self.ema.update(self.model)
        self.step += 1
        return self.average(loss.detach())

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        loss = self.average(self.loss(self.val.chunk(self.world)[self.rank]))
        self.model.train()
        self.model.reshard()  # the root group stays gathered after a forward without backward
        return loss

    def average(self, t):
        t = t.clone()
        dist.all_reduce(t)
        return t.item() / self.world

    def fit(self, steps):
        while self.step < steps:
            loss = self.train_step()
            self.log(f"step {self.step} loss {loss:.4f}")
            if self.args.save_every and self.step % self.args.save_every == 0:
                with self.ema.applied(self.model):
                    self.log(f"  ema val loss {self.evaluate():.4f}")
                    self.save(self.args.out)

    def state(self):
        model, optim = get_state_dict(self.model, self.opt)
        return {"model": model, "optim": optim, "ema": self.ema.state_dict(), "progress": {"step": self.step}}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=os.path.join(folder, f"step-{self.step:05d}"))

    def load_newest(self, folder):
        newest = max(d for d in os.listdir(folder) if d.startswith("step-"))
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.ema.load_state_dict(state["ema"])
        self.step = state["progress"]["step"]
        self.log(f"resumed from {newest}")

    def log(self, text):
        if self.rank == 0:
            print(text, flush=True)

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from keeper import BestKeeper
from yieldnet import plots


class Loop:
    def __init__(self, model, optimizer, cfg):
        self.model, self.optimizer, self.cfg = model, optimizer, cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train_set, self.dev_set = plots(1, 48, 0.6), plots(2, 128, 0.0)
        self.keeper = BestKeeper(model, cfg.patience)
        self.step = 0

    def say(self, *words):
        if self.rank == 0:
            print(*words, flush=True)

    def part(self, pair):
        return (t.chunk(self.world)[self.rank] for t in pair)

    def mse(self, pair):
        x, y = self.part(pair)
        return (self.model(x) - y).square().mean()

    def averaged(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    @torch.no_grad()
    def dev_loss(self):
        self.model.eval()
        value = self.averaged(self.mse(self.dev_set))
        self.model.train()
        return value

    def state(self):
        m, o = get_state_dict(self.model, self.optimizer)
        return {"model": m, "optimizer": o, "keeper": self.keeper.state_dict(), "step": self.step}

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, (sorted(d for d in os.listdir(folder) if d.startswith("t"))[-1])))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.keeper.load_state_dict(state["keeper"])
        self.step = state["step"]

    def fit(self):
        stop = False
        while self.step < self.cfg.steps and not stop:
            loss = self.mse(self.train_set)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            if self.step % self.cfg.eval_every == 0:
                dev = self.dev_loss()
                self.say(f"step {self.step}: train {self.averaged(loss):.4f} dev {dev:.4f}")
                stop = self.keeper.offer(dev, self.step)
            if self.cfg.save_every and self.step % self.cfg.save_every == 0:
                dcp.save(self.state(), checkpoint_id=os.path.join(self.cfg.out, f"t{self.step:04d}"))

    def finish(self):
        self.model.load_state_dict(self.keeper.weights)
        self.say(f"best step {self.keeper.best_step}, dev {self.keeper.best_score:.4f}")
        full = {k: v.full_tensor() for k, v in self.model.state_dict().items()}
        if self.cfg.out and self.rank == 0:
            os.makedirs(self.cfg.out, exist_ok=True)
            torch.save(full, os.path.join(self.cfg.out, "best_model.pt"))

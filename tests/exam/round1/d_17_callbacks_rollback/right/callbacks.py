"""Callbacks answer events of the trainer; those with memory have a state_dict that goes into the checkpoint."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Callback:
    key = None

    def on_step(self, trainer): ...
    def on_eval(self, trainer, value): ...
    def state_dict(self):
        return {}

    def load_state_dict(self, s): ...


class Print(Callback):
    def on_step(self, trainer):
        loss = trainer.last_loss.clone()
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {trainer.step:3d} loss {loss / dist.get_world_size():.4f} lr {trainer.lr:.4f}", flush=True)


class RollbackOnPlateau(Callback):
    """Keeps a copy of the best shards; after `patience` evaluations without gain goes back to them with a smaller rate."""

    key = "rollback"

    def __init__(self, patience, factor):
        self.patience, self.factor = patience, factor
        self.best, self.bad, self.rollbacks, self.copy = float("inf"), 0, 0, None

    def attach(self, net):
        self.copy = {n: p.detach().clone() for n, p in net.state_dict().items()}

    def on_eval(self, trainer, value):
        if value < self.best - 1e-3:
            self.best, self.bad = value, 0
            for n, p in trainer.net.state_dict().items():
                self.copy[n].copy_(p)
            return
        self.bad += 1
        if self.bad >= self.patience:
            trainer.net.load_state_dict(self.copy)
            trainer.optim.state.clear()  # the moments belong to the abandoned path
            trainer.set_lr(trainer.lr * self.factor)
            self.bad = 0
            self.rollbacks += 1
            if dist.get_rank() == 0:
                print(f"  rollback {self.rollbacks} to {self.best:.4f}", flush=True)

    def state_dict(self):
        return {
            "copy": self.copy,
            "best": torch.tensor(self.best, dtype=torch.float64),
            "count": torch.tensor([self.bad, self.rollbacks]),
        }

    def load_state_dict(self, s):
        self.copy, self.best = s["copy"], float(s["best"])
        self.bad, self.rollbacks = s["count"].tolist()


class Stop(Callback):
    """Ends the run after many rollbacks; all ranks see the same count."""

    def __init__(self, rollback, limit):
        self.rollback, self.limit = rollback, limit

    def on_eval(self, trainer, value):
        trainer.stop = self.rollback.rollbacks >= self.limit


class Save(Callback):
    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def on_step(self, trainer):
        if self.folder and self.every and trainer.step % self.every == 0:
            dcp.save(trainer.state(), checkpoint_id=os.path.join(self.folder, f"s{trainer.step:05d}"))

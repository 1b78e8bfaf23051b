import os

import torch
import torch.distributed as dist

from engine import Callback


class EarlyStopping(Callback):
    """Stops after `patience` epochs without improvement and puts the best weights back."""

    def __init__(self, patience, restore_best=True):
        self.patience, self.restore_best = patience, restore_best
        self.best, self.bad_epochs, self.best_weights = float("inf"), 0, None

    def on_epoch_end(self, engine, metrics):
        if metrics["val"] < self.best:
            self.best, self.bad_epochs = metrics["val"], 0
            self.best_weights = dict(engine.model.state_dict())
        else:
            self.bad_epochs += 1
            engine.should_stop = self.bad_epochs >= self.patience

    def on_fit_end(self, engine):
        if self.restore_best and self.best_weights is not None:
            engine.model.load_state_dict(self.best_weights)
            if dist.get_rank() == 0:
                print(f"restored the weights of the best epoch, val {self.best:.5f}", flush=True)

    def state_dict(self):
        return {"best": self.best, "bad_epochs": self.bad_epochs, "best_weights": self.best_weights}

    def load_state_dict(self, state):
        self.best, self.bad_epochs, self.best_weights = state["best"], state["bad_epochs"], state["best_weights"]


class RankCheckpoint(Callback):
    """Every rank writes its own DTensor shards; the number of ranks must be the same on resume."""

    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def on_epoch_end(self, engine, metrics):
        if not self.every or engine.epoch % self.every:
            return
        path = os.path.join(self.folder, f"epoch{engine.epoch:03d}")
        os.makedirs(path, exist_ok=True)
        state = {
            "model": engine.model.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
            "callbacks": [c.state_dict() for c in engine.callbacks],
            "epoch": engine.epoch,
            "should_stop": engine.should_stop,
        }
        torch.save(state, os.path.join(path, f"shard{dist.get_rank()}.pt"))
        dist.barrier()

    @staticmethod
    def restore(engine, folder):
        path = os.path.join(folder, max(os.listdir(folder)))
        state = torch.load(os.path.join(path, f"shard{dist.get_rank()}.pt"), weights_only=False)
        engine.model.load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        for callback, saved in zip(engine.callbacks, state["callbacks"]):
            callback.load_state_dict(saved)
        engine.epoch, engine.should_stop = state["epoch"], state["should_stop"]


class Export(Callback):
    def __init__(self, validate, path=None):
        self.validate, self.path = validate, path

    def on_fit_end(self, engine):
        weights = {name: value.full_tensor() for name, value in engine.model.state_dict().items()}
        score = self.validate(engine.model)
        if dist.get_rank() == 0:
            print(f"final model: val {score:.5f}", flush=True)
            if self.path:
                torch.save(weights, self.path)

import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class Callback:
    def on_eval(self, trainer, val_loss):
        pass

    def on_fit_end(self, trainer):
        pass


class BestModel(Callback):
    """Keeps the weights with the lowest validation loss and puts them back at the end."""

    def __init__(self, model):
        self.score = float("inf")
        self.weights = self.snapshot(model)

    @staticmethod
    def snapshot(model):
        return {k: v.detach() for k, v in model.state_dict().items()}

    def on_eval(self, trainer, val_loss):
        if val_loss < self.score:
            self.score = val_loss
            self.weights = self.snapshot(trainer.model)

    def on_fit_end(self, trainer):
        trainer.model.load_state_dict(self.weights)


class EarlyStopping(Callback):
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def on_eval(self, trainer, val_loss):
        if val_loss < self.best:
            self.best, self.bad = val_loss, 0
        else:
            self.bad += 1
        trainer.stop = self.bad >= self.patience


class Checkpointer(Callback):
    """Runs after the other callbacks, so that their state is up to date."""

    def __init__(self, folder, every, best, stopper):
        self.folder, self.every, self.best, self.stopper = folder, every, best, stopper

    def state(self, trainer):
        moments = {
            k: {n: v for n, v in s.items()} for k, s in trainer.opt_state().items()
        }
        return {
            "model": trainer.model.state_dict(),
            "moments": moments,
            "best_weights": self.best.weights,
            "numbers": torch.tensor(
                [trainer.epoch, self.best.score, self.stopper.best, self.stopper.bad], dtype=torch.float64
            ),
        }

    def on_eval(self, trainer, val_loss):
        if self.folder and trainer.epoch % self.every == 0:
            dcp.save(self.state(trainer), checkpoint_id=os.path.join(self.folder, f"{trainer.epoch:05d}"))

    def restore(self, trainer, folder):
        newest = os.path.dirname(max(glob.glob(os.path.join(folder, "*", ".metadata"))))
        trainer.init_opt_state()
        state = self.state(trainer)
        state["best_weights"] = {k: torch.empty_like(v) for k, v in self.best.weights.items()}
        dcp.load(state, checkpoint_id=newest)
        trainer.model.load_state_dict(state["model"])
        self.best.weights = state["best_weights"]
        epoch, self.best.score, self.stopper.best, bad = state["numbers"].tolist()
        trainer.epoch, self.stopper.bad = int(epoch), int(bad)
        trainer.stop = self.stopper.bad >= self.stopper.patience
        if dist.get_rank() == 0:
            print(f"resumed after epoch {trainer.epoch}", flush=True)

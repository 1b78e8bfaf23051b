import torch
import torch.distributed as dist


def _local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class Callback:
    def on_eval(self, trainer, val_loss): ...

    def on_train_end(self, trainer): ...

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class BestWeights(Callback):
    """Remembers this rank's shards of the best model so far and puts them back at the end of training."""

    def __init__(self):
        self.best, self.best_step, self.shards = float("inf"), -1, None

    def on_eval(self, trainer, val_loss):
        if val_loss < self.best:
            self.best, self.best_step = val_loss, trainer.step
            self.shards = {n: _local(p).detach().clone() for n, p in trainer.model.named_parameters()}

    @torch.no_grad()
    def on_train_end(self, trainer):
        if self.shards is None:
            return
        for n, p in trainer.model.named_parameters():
            _local(p).copy_(self.shards[n])
        if dist.get_rank() == 0:
            print(f"restored weights of step {self.best_step}, validation loss {self.best:.4f}")

    def state_dict(self):
        return {"best": self.best, "best_step": self.best_step, "shards": self.shards}

    def load_state_dict(self, state):
        self.best, self.best_step, self.shards = state["best"], state["best_step"], state["shards"]


class History(Callback):
    def __init__(self):
        self.values = []

    def on_eval(self, trainer, val_loss):
        self.values.append(val_loss)
        if dist.get_rank() == 0:
            print(f"step {trainer.step:3d} train {trainer.last_loss:.4f} val {val_loss:.4f}", flush=True)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]

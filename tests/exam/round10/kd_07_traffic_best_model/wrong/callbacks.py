import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


class KeepBest:
    """Remembers the (sharded) weights with the lowest validation error and puts them back at the end."""

    def __init__(self, patience):
        self.patience = patience
        self.best, self.best_at, self.weights = float("inf"), -1, None

    def after_eval(self, trainer, mae):
        if mae < self.best:
            self.best, self.best_at = mae, trainer.step
            self.weights = get_model_state_dict(trainer.model)
        elif trainer.step - self.best_at >= self.patience:
            trainer.stop = True

    def at_end(self, trainer):
        set_model_state_dict(trainer.model, self.weights)
        if dist.get_rank() == 0:
            print(f"best validation MAE {self.best:.4f} at step {self.best_at}", flush=True)

    def state_dict(self):
        return {"best": self.best, "best_at": self.best_at, "weights": self.weights}

    def load_state_dict(self, s):
        self.best, self.best_at, self.weights = s["best"], s["best_at"], s["weights"]


class Log:
    def after_eval(self, trainer, mae):
        if dist.get_rank() == 0:
            print(f"step {trainer.step} train loss {trainer.last_loss:.4f} validation MAE {mae:.4f}", flush=True)

    def at_end(self, trainer):
        pass

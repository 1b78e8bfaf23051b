import torch
import torch.distributed as dist


class Callback:
    def on_epoch_end(self, trainer): ...
    def on_train_end(self, trainer): ...
    def state_dict(self): return {}
    def load_state_dict(self, state): ...


class KeepBest(Callback):
    """Remembers the weights with the highest validation value and puts them back at the end."""

    def __init__(self, model):
        self.value = torch.tensor(-1e9)
        self.epoch = torch.tensor(-1)
        self.weights = self._snapshot(model)

    @staticmethod
    def _snapshot(model):
        return {k: v.detach() for k, v in model.state_dict().items()}

    def on_epoch_end(self, trainer):
        value = trainer.evaluate()
        if value > self.value:
            self.value, self.epoch = value, torch.tensor(trainer.epoch)
            self.weights = self._snapshot(trainer.model)
        trainer.history.append(value.item())

    def on_train_end(self, trainer):
        trainer.model.load_state_dict(self.weights)
        if dist.get_rank() == 0:
            print(f"kept epoch {int(self.epoch)} with value {self.value:.4f}")

    def state_dict(self):
        return {"value": self.value, "epoch": self.epoch, "weights": self.weights}

    def load_state_dict(self, state):
        self.value, self.epoch, self.weights = state["value"], state["epoch"], state["weights"]


class Report(Callback):
    def on_epoch_end(self, trainer):
        if dist.get_rank() == 0:
            print(f"epoch {trainer.epoch:2d} loss {trainer.epoch_loss:.4f} value {trainer.history[-1]:.4f}")

"""Trainer callbacks. A callback may own state; the trainer stores it under the callback's key."""
import torch


class Callback:
    priority = 0

    def on_start(self, trainer): ...

    def on_step_end(self, trainer): ...

    def on_finish(self, trainer): ...

    @property
    def key(self):
        return type(self).__name__

    def state_dict(self):
        return {}

    def load_state_dict(self, state): ...


class WeightAverage(Callback):
    """Exponential average of the weights; several with different horizons may run side by side."""

    def __init__(self, decay):
        self.decay = decay
        self.shadow = {}

    @property
    def key(self):
        return f"{type(self).__name__}-{self.decay}"

    def on_start(self, trainer):
        self.shadow = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, trainer):
        for name, p in trainer.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - self.decay)

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        for name, value in state.items():
            self.shadow[name].copy_(value)

    @torch.no_grad()
    def on_finish(self, trainer):
        live = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        for name, p in trainer.model.named_parameters():
            p.copy_(self.shadow[name])
        trainer.report(f"average {self.decay}: held-out loss {trainer.evaluate():.5f}")
        trainer.export(f"average_{self.decay}.pt")
        for name, p in trainer.model.named_parameters():
            p.copy_(live[name])


class Progress(Callback):
    priority = 10

    def __init__(self, every):
        self.every, self.best = every, float("inf")

    def on_step_end(self, trainer):
        self.best = min(self.best, trainer.last_loss)
        if trainer.step % self.every == 0:
            trainer.report(f"step {trainer.step} loss {trainer.last_loss:.5f} best {self.best:.5f}")

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]

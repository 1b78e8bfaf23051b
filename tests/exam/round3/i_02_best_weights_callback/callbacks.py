import torch


class Callback:
    def on_fit_start(self, trainer): ...
    def on_step_end(self, trainer): ...
    def on_validation_end(self, trainer, val_loss): ...
    def on_fit_end(self, trainer): ...


class Printer(Callback):
    def __init__(self, every):
        self.every = every

    def on_step_end(self, trainer):
        if trainer.step % self.every == 0:
            loss = trainer.mean_over_ranks(trainer.last_loss)
            trainer.log(f"step {trainer.step:3d}  train {loss:.4f}")

    def on_validation_end(self, trainer, val_loss):
        trainer.log(f"step {trainer.step:3d}  valid {val_loss:.4f}")


class EarlyStopping(Callback):
    """Stop after `patience` validations without progress and put the best weights back."""

    def __init__(self, patience=6, min_delta=1e-4):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.best_step, self.bad, self.snapshot = float("inf"), -1, 0, None

    @torch.no_grad()
    def on_validation_end(self, trainer, val_loss):
        if val_loss < self.best - self.min_delta:
            self.best, self.best_step, self.bad = val_loss, trainer.step, 0
            self.snapshot = {n: p.to_local().cpu().clone() for n, p in trainer.model.named_parameters()}
        else:
            self.bad += 1
            if self.bad >= self.patience:
                trainer.log(f"no progress since step {self.best_step}, stopping")
                trainer.should_stop = True

    @torch.no_grad()
    def on_fit_end(self, trainer):
        if self.snapshot is None:
            return
        for n, p in trainer.model.named_parameters():
            p.to_local().copy_(self.snapshot[n])
        trainer.log(f"best weights of step {self.best_step} restored (valid {self.best:.4f})")


class Exporter(Callback):
    """Writes the full weights once training is over."""

    def __init__(self, path):
        self.path = path

    def on_fit_end(self, trainer):
        full = {n: p.full_tensor().detach().clone() for n, p in trainer.model.named_parameters()}
        if trainer.rank == 0:
            torch.save(full, self.path)
            trainer.log(f"exported {len(full)} tensors to {self.path}")

import torch

from lora import adapter_parameters


class EarlyStopping:
    """Keeps the adapter (as shards) of the best evaluation and says when to stop."""

    def __init__(self, patience=4):
        self.patience = patience
        self.best_loss = float("inf")
        self.best_step = 0
        self.best = None
        self.bad = 0

    def update(self, step, loss, model):
        if loss < self.best_loss:
            self.best_loss, self.best_step, self.bad = loss, step, 0
            self.best = {n: p.detach().to_local() for n, p in adapter_parameters(model).items()}
        else:
            self.bad += 1
        return self.bad >= self.patience

    @torch.no_grad()
    def restore(self, model):
        for n, p in adapter_parameters(model).items():
            p.to_local().copy_(self.best[n])

    def state_dict(self):
        return dict(best_loss=self.best_loss, best_step=self.best_step, best=self.best, bad=self.bad)

    def load_state_dict(self, state):
        self.__dict__.update(state)

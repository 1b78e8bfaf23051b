from contextlib import contextmanager

import torch


class WeightAverage:
    """Exponential moving average of the weights, kept shard by shard."""

    def __init__(self, model, decay):
        self.decay = decay
        self.params = dict(model.named_parameters())
        self.mean = {n: p.detach().to_local().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def update(self):
        for n, p in self.params.items():
            self.mean[n].lerp_(p.to_local(), 1 - self.decay)

    @contextmanager
    def swapped_in(self):
        with torch.no_grad():
            kept = {n: p.to_local().clone() for n, p in self.params.items()}
            for n, p in self.params.items():
                p.to_local().copy_(self.mean[n])
            yield
            for n, p in self.params.items():
                p.to_local().copy_(kept[n])

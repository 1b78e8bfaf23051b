"""Exponential average of the weights, kept sharded beside the model."""
from contextlib import contextmanager

import torch


class WeightAverage:
    def __init__(self, model, decay: float):
        self.model = model
        self.decay = decay
        self.params = dict(model.named_parameters())
        self.shadow = {n: p.detach().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def update(self):
        for n, p in self.params.items():
            self.shadow[n].lerp_(p.detach(), 1.0 - self.decay)

    @contextmanager
    def applied(self):
        """Run the model with the averaged weights inside the block."""
        backup = {n: p.detach().clone() for n, p in self.params.items()}
        self._write(self.shadow)
        try:
            yield self.model
        finally:
            self.model.reshard()
            self._write(backup)

    @torch.no_grad()
    def _write(self, values):
        for n, p in self.params.items():
            p.detach().copy_(values[n])

from contextlib import contextmanager

import torch


class ShardEMA:
    """Moving average of the parameters, each rank keeps the average of its own shards."""

    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shards = {n: p.detach().to_local().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self):
        for n, p in self.model.named_parameters():
            self.shards[n].lerp_(p.to_local(), 1 - self.decay)

    @torch.no_grad()
    def _exchange(self):
        for n, p in self.model.named_parameters():
            kept = p.to_local().clone()
            p.to_local().copy_(self.shards[n])
            self.shards[n].copy_(kept)

    @contextmanager
    def applied(self):
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

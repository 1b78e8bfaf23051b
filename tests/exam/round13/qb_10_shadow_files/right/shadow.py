import contextlib

import torch


class ShardShadow:
    """Running average of this rank's shards. No collective is needed: the average is elementwise."""

    def __init__(self, model, decay=0.95):
        self.params = list(model.parameters())
        self.decay = decay
        self.values = [p.detach().to_local().clone() for p in self.params]
        self.count = 0

    @torch.no_grad()
    def update(self):
        self.count += 1
        decay = min(self.decay, self.count / (self.count + 4))
        for v, p in zip(self.values, self.params):
            v.lerp_(p.to_local(), 1 - decay)

    @torch.no_grad()
    def _swap(self):
        for v, p in zip(self.values, self.params):
            local = p.to_local()
            keep = local.clone()
            local.copy_(v)
            v.copy_(keep)

    @contextlib.contextmanager
    def applied(self):
        self._swap()
        try:
            yield
        finally:
            self._swap()

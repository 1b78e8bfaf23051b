from contextlib import contextmanager

import torch


class ShardedEMA:
    """Exponential moving average of the (sharded) parameters; each rank keeps the average of its own shards."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1 - self.decay)

    @contextmanager
    def applied(self, model):
        """Puts the averaged weights into the model for the time of the block."""
        raw = {n: p.detach().clone() for n, p in model.named_parameters()}
        self._copy(self.shadow, model)
        try:
            yield model
        finally:
            self._copy(raw, model)

    @staticmethod
    @torch.no_grad()
    def _copy(values, model):
        for n, p in model.named_parameters():
            p.copy_(values[n])

    def state_dict(self):
        return dict(self.shadow)

    def load_state_dict(self, state):
        for n, t in state.items():
            self.shadow[n].copy_(t)

from contextlib import contextmanager

import torch


class WeightAverage:
    """Exponential moving average of the (sharded) weights, kept beside the model."""

    def __init__(self, model, decay):
        self.decay = decay
        self.updates = 0
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (4 + self.updates))
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1 - decay)

    @contextmanager
    def applied_to(self, model):
        """Run the body with the averaged weights in place of the current ones."""
        backup = {n: p.detach() for n, p in model.named_parameters()}
        self._copy(self.shadow, model)
        try:
            yield model
        finally:
            model.reshard()     # a forward without backward leaves the root gathered
            self._copy(backup, model)

    @staticmethod
    @torch.no_grad()
    def _copy(source, model):
        for n, p in model.named_parameters():
            p.copy_(source[n])

    def state_dict(self):
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        for n, v in state["shadow"].items():
            self.shadow[n].copy_(v)

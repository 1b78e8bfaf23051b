import contextlib

import torch


class WeightEMA:
    """Exponential moving average of the sharded weights, kept in float32."""

    def __init__(self, model, decay):
        self.decay = decay
        self.updates = 0
        self.shadow = {n: p.detach().to(torch.float32, copy=True) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(self.decay, self.updates / (self.updates + 4))
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.detach().float(), 1 - decay)

    @contextlib.contextmanager
    def applied_to(self, model):
        """Runs the body with the averaged weights in the model."""
        with torch.no_grad():
            raw = {n: p.detach().clone() for n, p in model.named_parameters()}
            for n, p in model.named_parameters():
                p.copy_(self.shadow[n])
            yield
            model.reshard()  # the root keeps its weights gathered after a forward without backward
            for n, p in model.named_parameters():
                p.copy_(raw[n])

    def state_dict(self):
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        with torch.no_grad():
            for n, t in self.shadow.items():
                t.copy_(state["shadow"][n])

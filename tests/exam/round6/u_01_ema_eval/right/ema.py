from contextlib import contextmanager

import torch


class ShardedEMA:
    """Keeps the average as sharded tensors next to the parameters."""

    def __init__(self, model, decay):
        self.decay = decay
        self.names = [n for n, _ in model.named_parameters()]
        self.params = list(model.parameters())
        self.shadow = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, self.params):
            s.mul_(self.decay).add_(p.detach(), alpha=1.0 - self.decay)

    @contextmanager
    def applied(self):
        """Evaluate with the averaged weights, then put the trained ones back."""
        kept = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            for p, s in zip(self.params, self.shadow):
                p.copy_(s)
        yield
        with torch.no_grad():
            for p, k in zip(self.params, kept):
                p.copy_(k)

    def state_dict(self):
        return dict(zip(self.names, self.shadow))

from contextlib import contextmanager

import torch


class ShardedEma:
    """Moving average of the local shards; every rank averages only what it owns."""

    def __init__(self, model, decay):
        self.model = model
        self.params = list(model.named_parameters())
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in self.params}

    @torch.no_grad()
    def update(self):
        for n, p in self.params:
            self.shadow[n].to_local().lerp_(p.to_local(), 1.0 - self.decay)

    @contextmanager
    def applied(self):
        """Run the model with the averaged weights inside the block."""
        with torch.no_grad():
            saved = {n: p.detach().to_local().clone() for n, p in self.params}
            for n, p in self.params:
                p.to_local().copy_(self.shadow[n].to_local())
        try:
            yield
        finally:
            with torch.no_grad():
                for n, p in self.params:
                    p.to_local().copy_(saved[n])
            self.model.reshard()   # the root stays gathered after a forward without backward

    def state_dict(self):
        return dict(self.shadow)

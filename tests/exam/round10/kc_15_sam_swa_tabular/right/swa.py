import contextlib

import torch


class ShardedSWA:
    """Equal-weight average of the weights, kept as local shards in float64."""

    def __init__(self, model):
        self.model = model
        self.count = 0
        self.mean = [p.detach().to_local().double().clone() for p in model.parameters()]

    @torch.no_grad()
    def collect(self):
        self.count += 1
        for m, p in zip(self.mean, self.model.parameters()):
            m += (p.to_local().double() - m) / self.count

    @contextlib.contextmanager
    def applied(self):
        self.model.reshard()  # an evaluation leaves the root gathered
        with torch.no_grad():
            kept = [p.to_local().clone() for p in self.model.parameters()]
            for p, m in zip(self.model.parameters(), self.mean):
                p.to_local().copy_(m)
        try:
            yield
        finally:
            self.model.reshard()
            with torch.no_grad():
                for p, k in zip(self.model.parameters(), kept):
                    p.to_local().copy_(k)

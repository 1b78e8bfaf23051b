import torch
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class Shadow:
    """Moving average of a sharded model, kept as plain local shards on each rank."""

    def __init__(self, model, decay):
        self.model, self.decay, self.updates = model, decay, 0
        self.shards = [local(p).detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for s, p in zip(self.shards, self.model.parameters()):
            s.lerp_(local(p), 1 - d)

    @torch.no_grad()
    def swap(self):
        """Exchanges the average and the live weights; a second call undoes it."""
        for s, p in zip(self.shards, self.model.parameters()):
            live = local(p).clone()
            local(p).copy_(s)
            s.copy_(live)

    def __enter__(self):
        self.swap()

    def __exit__(self, *exc):
        self.swap()

import contextlib

import torch
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class PowerEMA:
    """Several EMAs with power-function profiles (weight of step s ~ s**gamma), on local shards."""

    def __init__(self, model, gammas=(2.0, 6.0)):
        self.params = dict(model.named_parameters())
        self.gammas = gammas
        self.avg = {str(g): {n: local(p.detach()).clone() for n, p in self.params.items()} for g in gammas}

    @torch.no_grad()
    def update(self, t):
        for g in self.gammas:
            beta = (1 - 1 / t) ** (g + 1)
            for n, p in self.params.items():
                self.avg[str(g)][n].lerp_(local(p), 1 - beta)

    @contextlib.contextmanager
    def use(self, gamma):
        """The model carries this average inside the block."""
        with torch.no_grad():
            kept = {n: local(p).clone() for n, p in self.params.items()}
            for n, p in self.params.items():
                local(p).copy_(self.avg[str(gamma)][n])
        try:
            yield
        finally:
            with torch.no_grad():
                for n, p in self.params.items():
                    local(p).copy_(kept[n])

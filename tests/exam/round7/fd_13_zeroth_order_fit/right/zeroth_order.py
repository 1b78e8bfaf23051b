"""Training without backward passes (antithetic random directions, MeZO style) for FSDP2 parameters.

A direction is never stored: it is drawn again from its seed. It is drawn for the whole parameter and then cut to the
rows of this rank, so that it does not depend on the number of ranks.
"""
import torch
from torch.distributed.tensor import DTensor


class Directions:
    def __init__(self, model):
        self.params = list(model.parameters())

    def _local(self, p):
        return p.to_local() if isinstance(p, DTensor) else p.data

    def _cut(self, noise, p):
        if not isinstance(p, DTensor):
            return noise
        pieces = noise.chunk(p.device_mesh.size())
        i = p.device_mesh.get_local_rank()
        return pieces[i] if i < len(pieces) else noise[:0]

    @torch.no_grad()
    def add(self, seed, scale):
        g = torch.Generator().manual_seed(seed)
        for p in self.params:
            z = torch.randn(p.shape, generator=g, dtype=p.dtype)
            self._local(p).add_(self._cut(z, p), alpha=scale)


class ZerothOrder:
    def __init__(self, model, lr, eps=1e-3, directions=4, momentum=0.8):
        self.dirs = Directions(model)
        self.lr, self.eps, self.n, self.momentum = lr, eps, directions, momentum
        self.past = []      # (seed, coefficient) of the last updates: the momentum, in a few bytes

    def step(self, loss_fn, seeds):
        slopes, mean = [], 0.0
        for s in seeds:
            self.dirs.add(s, self.eps)
            up = loss_fn()
            self.dirs.add(s, -2 * self.eps)
            down = loss_fn()
            self.dirs.add(s, self.eps)
            slopes.append((up - down) / (2 * self.eps))
            mean += (up + down) / 2 / self.n
        self.past = [(s, c * self.momentum) for s, c in self.past if abs(c) * self.momentum > 1e-6]
        self.past = self.past[-6 * self.n:] + [(s, c / self.n) for s, c in zip(seeds, slopes)]
        for s, c in self.past:
            self.dirs.add(s, -self.lr * c)
        return mean

    def state_dict(self):
        return {"past": list(self.past)}

    def load_state_dict(self, sd):
        self.past = [tuple(x) for x in sd["past"]]

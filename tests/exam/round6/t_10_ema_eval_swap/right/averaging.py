from contextlib import contextmanager

import torch


class EMA:
    def __init__(self, params, decay):
        self.decay = decay
        self.params = list(params)
        self.avg = [p.detach().clone() for p in self.params]

    @torch.no_grad()
    def update(self):
        for a, p in zip(self.avg, self.params):
            a.lerp_(p, 1 - self.decay)

    @contextmanager
    def applied(self):
        """Run a block with the averaged weights in place of the trained ones."""
        kept = [p.detach().clone() for p in self.params]
        self._write(self.avg)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values):
        for p, v in zip(self.params, values):
            p.copy_(v)

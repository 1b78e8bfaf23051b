from contextlib import contextmanager

import torch


class EMA:
    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        for s, p in zip(self.shadow, model.parameters()):
            s.lerp_(p.detach(), 1 - self.decay)

    @contextmanager
    @torch.no_grad()
    def applied(self, model):
        """evaluate with the averaged weights, then put the live ones back"""
        live = [p.detach().clone() for p in model.parameters()]
        for p, s in zip(model.parameters(), self.shadow):
            p.copy_(s)
        try:
            yield model
        finally:
            for p, saved in zip(model.parameters(), live):
                p.copy_(saved)

    def state_dict(self, model):
        return {n: s for (n, _), s in zip(model.named_parameters(), self.shadow)}

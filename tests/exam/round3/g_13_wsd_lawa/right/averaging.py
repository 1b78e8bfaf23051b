"""Latest weight averaging: a ring of the last k weights, every rank keeps its own shards. The mean is used for evaluation only."""

from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor


class Ring:
    def __init__(self, model, size):
        self.model, self.size = model, size
        self.slots = [{n: torch.zeros_like(p) for n, p in model.named_parameters()} for _ in range(size)]
        self.filled = 0

    @torch.no_grad()
    def push(self):
        slot = self.slots[self.filled % self.size]
        for n, p in self.model.named_parameters():
            slot[n].copy_(p)
        self.filled += 1

    @contextmanager
    def mean_weights(self):
        """puts the mean into the model for the time of the with block"""
        used = min(self.filled, self.size)
        kept = {}
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                kept[n] = local.clone()
                shards = [s[n].to_local() if isinstance(s[n], DTensor) else s[n] for s in self.slots[:used]]
                local.copy_(torch.stack(shards).mean(0))
        try:
            yield
        finally:
            with torch.no_grad():
                for n, p in self.model.named_parameters():
                    (p.to_local() if isinstance(p, DTensor) else p).copy_(kept[n])

    def state_dict(self):
        return {"filled": self.filled, "slots": {str(i): s for i, s in enumerate(self.slots)}}

    def load_state_dict(self, state):
        self.filled = state["filled"]
        for i, slot in enumerate(self.slots):
            for n, t in slot.items():
                t.copy_(state["slots"][str(i)][n])

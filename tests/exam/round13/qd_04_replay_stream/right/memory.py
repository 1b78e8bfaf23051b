"""Episodic memory: a reservoir over the batches of the stream. Every rank keeps its own part of each kept batch."""
import torch


class Reservoir:
    def __init__(self, slots):
        self.slots, self.seen = slots, 0
        self.items = []

    def offer(self, x, y, generator):
        """Algorithm R; the generator is the same on all ranks, so they keep the same batches."""
        self.seen += 1
        if len(self.items) < self.slots:
            self.items.append((x.clone(), y.clone()))
            return
        j = int(torch.randint(0, self.seen, (1,), generator=generator))
        if j < self.slots:
            self.items[j] = (x.clone(), y.clone())

    def draw(self, generator):
        j = int(torch.randint(0, len(self.items), (1,), generator=generator))
        return self.items[j]

    def state_dict(self):
        return {"seen": self.seen, "items": self.items}

    def load_state_dict(self, state):
        self.seen, self.items = state["seen"], list(state["items"])

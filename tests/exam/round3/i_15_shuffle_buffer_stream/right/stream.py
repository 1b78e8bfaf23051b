"""An endless made-up event log, a shuffle buffer over it and length buckets. Every rank runs the whole pipeline
(it is cheap) and keeps its own rows, so the order does not depend on the number of ranks."""

import random

import torch


class EventLog:
    """Sequences of varying length; label = which of two markers came last."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        r = random.Random(self.position * 7919 + 5)
        self.position += 1
        n = r.choice((6, 8, 10, 12))
        ids = [r.randrange(3, 16) for _ in range(n)]
        i, j = r.sample(range(n), 2)
        ids[i], ids[j] = 1, 2
        return ids, int(j > i)


class ShuffleBuffer:
    def __init__(self, source, size, seed):
        self.source, self.size, self.rng, self.items = source, size, random.Random(seed), []

    def __next__(self):
        while len(self.items) < self.size:
            self.items.append(next(self.source))
        k = self.rng.randrange(self.size)
        self.items[k], self.items[-1] = self.items[-1], self.items[k]
        return self.items.pop()


class Bucketed:
    """Collects items of one length until a global batch is full."""

    def __init__(self, source, batch, rank, world):
        self.source, self.batch, self.rank, self.world, self.bins = source, batch, rank, world, {}

    def __iter__(self):
        return self

    def __next__(self):
        while True:
            ids, label = next(self.source)
            pile = self.bins.setdefault(len(ids), [])
            pile.append((ids, label))
            if len(pile) == self.batch:
                del self.bins[len(ids)]
                mine = pile[self.rank :: self.world]
                return torch.tensor([m[0] for m in mine]), torch.tensor([m[1] for m in mine])


class Pipeline:
    def __init__(self, batch, rank, world):
        self.log = EventLog()
        self.buffer = ShuffleBuffer(self.log, 64, seed=1)
        self.buckets = Bucketed(self.buffer, batch, rank, world)

    def __iter__(self):
        return iter(self.buckets)

    def state_dict(self):
        return {
            "position": self.log.position,
            "items": list(self.buffer.items),
            "rng": self.buffer.rng.getstate(),
            "bins": {k: list(v) for k, v in self.buckets.bins.items()},
        }

    def load_state_dict(self, sd):
        self.log.position = sd["position"]
        self.buffer.items = list(sd["items"])
        self.buffer.rng.setstate(sd["rng"])
        self.buckets.bins = {k: list(v) for k, v in sd["bins"].items()}

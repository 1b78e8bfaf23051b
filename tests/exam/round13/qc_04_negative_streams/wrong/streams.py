"""Candidate streams for implicit feedback.

The interaction log is dealt into a fixed number of streams, each with a shuffled order and a generator of its own for
negative items. A rank serves `STREAMS // world` of them, so the batches do not depend on the number of ranks.
"""
import torch

STREAMS = 4


class Stream:
    def __init__(self, users, items, catalogue, seed):
        self.users, self.items, self.catalogue = users, items, catalogue
        self.gen = torch.Generator().manual_seed(seed)
        self.order = torch.empty(0, dtype=torch.long)
        self.at = 0

    def take(self, n, negatives):
        if self.at + n > len(self.order):
            self.order = torch.randperm(len(self.users), generator=self.gen)
            self.at = 0
        rows = self.order[self.at:self.at + n]
        self.at += n
        neg = torch.randint(self.catalogue, (n, negatives), generator=self.gen)
        return self.users[rows], self.items[rows], neg

    def state_dict(self):
        order = torch.full((len(self.users),), -1)
        order[:len(self.order)] = self.order
        return {"gen": self.gen.get_state(), "order": order, "at": torch.tensor(self.at)}

    def load_state_dict(self, state):
        self.gen.set_state(state["gen"])
        self.order = state["order"][state["order"] >= 0].clone()
        self.at = int(state["at"])


class StreamSet:
    def __init__(self, users, items, catalogue, rank, world, seed=100):
        per_rank = STREAMS // world
        self.ids = range(rank * per_rank, (rank + 1) * per_rank)
        self.streams = [Stream(users[i::STREAMS], items[i::STREAMS], catalogue, seed + i) for i in self.ids]

    def take(self, n, negatives):
        parts = [s.take(n, negatives) for s in self.streams]
        return [torch.cat(p) for p in zip(*parts)]

    def state_dict(self):
        return {f"stream{i}": s.state_dict() for i, s in enumerate(self.streams)}

    def load_state_dict(self, state):
        for i, s in enumerate(self.streams):
            s.load_state_dict(state[f"stream{i}"])

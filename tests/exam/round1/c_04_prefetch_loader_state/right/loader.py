"""A data loader with state: it can be stopped and continued in the middle of an epoch."""

from collections import deque

import torch


class Corpus:
    def __init__(self, n=960, dim=12, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, dim, generator=g)
        w = torch.randn(dim, 3, generator=g)
        self.y = torch.sin(0.4 * self.x @ w)

    def __len__(self):
        return len(self.x)


class StatefulLoader:
    """Yields this rank's part of every global batch and keeps `depth` batches ready."""

    def __init__(self, corpus, global_batch, rank, world, seed=11, depth=3):
        self.corpus, self.batch, self.rank, self.world = corpus, global_batch, rank, world
        self.seed, self.depth = seed, depth
        self.per_epoch = len(corpus) // global_batch
        self.fetched = 0
        self.delivered = 0
        self.queue = deque()

    def _fetch(self):
        epoch, index = divmod(self.fetched, self.per_epoch)
        g = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(len(self.corpus), generator=g)
        ids = order[index * self.batch : (index + 1) * self.batch][self.rank :: self.world]
        self.queue.append((ids, self.corpus.x[ids], self.corpus.y[ids]))
        self.fetched += 1

    def __iter__(self):
        return self

    def __next__(self):
        while len(self.queue) < self.depth:
            self._fetch()
        self.delivered += 1
        return self.queue.popleft()

    def state_dict(self):
        return {"position": self.delivered, "seed": self.seed}

    def load_state_dict(self, state):
        self.seed = state["seed"]
        self.fetched = self.delivered = state["position"]
        self.queue.clear()

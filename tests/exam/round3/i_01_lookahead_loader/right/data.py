"""Synthetic language: every sequence follows a noisy affine rule over the vocabulary."""

from collections import deque

import torch


def make_corpus(n=512, length=12, vocab=24, seed=7):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, vocab, (n, 1), generator=g)
    stride = torch.randint(1, 4, (n, 1), generator=g)
    seq = (start + stride * torch.arange(length)) % vocab
    noise = torch.rand(n, length, generator=g) < 0.03
    seq[noise] = torch.randint(0, vocab, (int(noise.sum()),), generator=g)
    return seq


class EpochSampler:
    """Yields global batches of indices, reshuffled every epoch. Knows where it stands."""

    def __init__(self, n, batch, seed):
        self.n, self.batch, self.seed = n, batch, seed
        self.epoch, self.index = 0, 0

    def _perm(self):
        return torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    def __iter__(self):
        while True:
            perm = self._perm()
            while self.index + self.batch <= self.n:
                ids = perm[self.index : self.index + self.batch]
                self.index += self.batch
                yield ids
            self.epoch, self.index = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, sd):
        self.epoch, self.index = sd["epoch"], sd["index"]


class LookaheadLoader:
    """Collates `depth` batches ahead so that the step never waits for the host."""

    def __init__(self, corpus, sampler, rank, world, depth=3):
        self.corpus, self.sampler = corpus, sampler
        self.rank, self.world, self.depth = rank, world, depth
        self._delivered = sampler.state_dict()

    def _collate(self, ids):
        seq = self.corpus[ids[self.rank :: self.world]]
        return seq[:, :-1].contiguous(), seq[:, 1:].contiguous()

    def __iter__(self):
        queue, source = deque(), iter(self.sampler)
        while True:
            while len(queue) < self.depth:
                ids = next(source)
                queue.append((self._collate(ids), self.sampler.state_dict()))
            batch, self._delivered = queue.popleft()
            yield batch

    def state_dict(self):
        return {"sampler": dict(self._delivered), "depth": self.depth}

    def load_state_dict(self, sd):
        self.sampler.load_state_dict(sd["sampler"])
        self._delivered = self.sampler.state_dict()

"""Loss-proportional sampling with importance weights."""

import torch


class HardMiner:
    def __init__(self, n, seed, smooth=0.5, floor=0.1):
        self.score = torch.ones(n)
        self.gen = torch.Generator().manual_seed(seed)
        self.smooth, self.floor, self.n = smooth, floor, n

    def probabilities(self):
        s = self.score + self.floor
        return s / s.sum()

    def draw(self, size):
        p = self.probabilities()
        idx = torch.multinomial(p, size, replacement=False, generator=self.gen)
        weight = (1.0 / (self.n * p[idx])).clamp(max=4.0) ** 0.5
        return idx, weight

    def update(self, idx, loss):
        self.score[idx] = self.smooth * self.score[idx] + (1 - self.smooth) * loss

"""Many long series (sensors). A stream is read from left to right in chunks, never shuffled."""

import math

import torch


class Streams:
    def __init__(self, streams=16, length=400, seed=31):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(length + 1, dtype=torch.float32)
        freq = 0.05 + 0.25 * torch.rand(streams, 1, generator=g)
        level = torch.randn(streams, 1, generator=g)
        phase = 2 * math.pi * torch.rand(streams, 1, generator=g)
        slow = torch.cumsum(0.15 * torch.randn(streams, length + 1, generator=g), 1) * 0.3
        self.values = level + torch.sin(freq * t + phase) + slow
        self.count, self.length = streams, length

    def part(self, rank, world):
        per = self.count // world
        self.values = self.values[rank * per : (rank + 1) * per]
        return self

    def chunk(self, step, size):
        start = (step * size) % (self.length - size)
        piece = self.values[:, start : start + size + 1]
        return piece[:, :-1, None], piece[:, 1:, None], start == 0

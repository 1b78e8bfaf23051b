import torch

from model import VOCAB


def make_walk(n, length, stride, noise, g):
    first = torch.randint(0, VOCAB, (n, 1), generator=g)
    hop = torch.full((n, length - 1), stride)
    wild = torch.rand(n, length - 1, generator=g) < noise
    hop = torch.where(wild, torch.randint(0, VOCAB, (n, length - 1), generator=g), hop)
    return torch.cat([first, first + hop.cumsum(1)], dim=1) % VOCAB


def preference_set(n=512, length=10, seed=11):
    g = torch.Generator().manual_seed(seed)
    chosen = make_walk(n, length, 3, 0.1, g)
    rejected = make_walk(n, length, 5, 0.3, g)
    rejected[:, 0] = chosen[:, 0]
    return chosen, rejected


def sft_set(n=128, length=10, seed=12):
    g = torch.Generator().manual_seed(seed)
    half = n // 2
    return torch.cat([make_walk(half, length, 3, 0.2, g), make_walk(half, length, 5, 0.2, g)])


def batch_for(step, size, rank, world, n, seed=5):
    """Global batch of the step, then this rank's part."""
    g = torch.Generator().manual_seed(seed * 100003 + step)
    picked = torch.randperm(n, generator=g)[:size]
    per = size // world
    return picked[rank * per : (rank + 1) * per]

"""Road-sensor speeds on a ring of junctions: rush hours that travel along the ring."""
import math

import torch


def ring_adjacency(n):
    a = torch.zeros(n, n)
    i = torch.arange(n)
    a[i, (i + 1) % n] = 1
    a[i, (i - 1) % n] = 1
    a[i, i] = 1
    return a / a.sum(1, keepdim=True)


def speeds(n=16, steps=260, seed=8):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(steps)[:, None].float()
    where = torch.arange(n)[None].float()
    wave = torch.sin(2 * math.pi * (t / 24 - where / n))
    x = wave + 0.3 * torch.sin(2 * math.pi * t / 12 + where) + 0.6 * torch.randn(steps, n, generator=g)
    return x


def windows(x, ids, context=12, ahead=3):
    idx = ids[:, None] + torch.arange(context + ahead)
    w = x[idx]                                    # batch, time, node
    return w[:, :context].transpose(1, 2), w[:, context:].transpose(1, 2)

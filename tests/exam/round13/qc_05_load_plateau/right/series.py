"""Hourly load of a few regions, cut into windows (history -> horizon). Regions differ in level, shape and noise."""
import math

import torch

REGIONS, HISTORY, HORIZON = 8, 24, 6


def make_windows(seed=21, hours=24 * 14):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours, dtype=torch.float32)
    train, valid = [], []
    for r in range(REGIONS):
        amp, phase = 0.5 + torch.rand(2, generator=g)
        load = amp * torch.sin(2 * math.pi * t / 24 + phase * r) + 0.3 * torch.cos(2 * math.pi * t / (24 * 7) + r)
        load = load + (0.05 + 0.06 * r) * torch.randn(hours, generator=g)
        w = load.unfold(0, HISTORY + HORIZON, 4)
        cut = int(0.8 * len(w))
        train.append(w[:cut])
        valid.append(w[cut:])
    return train, valid


def split(w):
    return w[:, :HISTORY], w[:, HISTORY:]

"""Hourly load of a few dozen substations: daily and weekly cycles, drift, and outages that make spikes."""
import math

import torch


def make_load(n_series=32, hours=400, seed=21):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(hours).float()
    phase = torch.rand(n_series, 1, generator=g) * 24
    size = 0.5 + torch.rand(n_series, 1, generator=g) * 2
    day = torch.sin(2 * math.pi * (t + phase) / 24)
    week = 0.4 * torch.sin(2 * math.pi * t / 168 + phase)
    noise = 0.1 * torch.randn(n_series, hours, generator=g)
    spikes = (torch.rand(n_series, hours, generator=g) < 0.02).float() * 2.5 * size
    return size * (day + week) + noise + spikes


def batch_at(load, step, global_batch, context, horizon, seed):
    g = torch.Generator().manual_seed(seed * 100003 + step)
    s = torch.randint(0, load.shape[0], (global_batch,), generator=g)
    t0 = torch.randint(0, load.shape[1] - context - horizon, (global_batch,), generator=g)
    idx = t0[:, None] + torch.arange(context + horizon)
    x = load[s[:, None], idx]
    return x[:, :context], x[:, context:]

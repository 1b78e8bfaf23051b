"""Synthetic vital signs, measured at irregular minutes of a week."""
import math

import torch

WEEK = 7 * 24 * 60


def make_patients(n, events=20, seed=31):
    g = torch.Generator().manual_seed(seed)
    minute = torch.stack([torch.randperm(WEEK, generator=g)[:events].sort()[0] for _ in range(n)])
    phase = torch.rand(n, 1, generator=g) * 2 * math.pi
    level = torch.randn(n, 1, generator=g)

    def signal(m):
        fast = torch.sin(2 * math.pi * m / 60.0)
        slow = torch.sin(2 * math.pi * m / 1440.0 + phase)
        return 0.5 * level + 0.5 * slow + fast

    value = signal(minute) + 0.05 * torch.randn(n, events, generator=g)
    query = torch.randint(0, WEEK, (n, 6), generator=g)
    return {"minute": minute, "value": value, "query": query, "target": signal(query)}


def pick(data, index):
    """Inputs and target of the chosen patients."""
    minute, query = data["minute"][index], data["query"][index]
    return (data["value"][index], minute, query), data["target"][index]

"""Synthetic kinetics: yield of a two-step reaction from temperature, time and concentrations."""
import torch


def simulate(temperature, g):
    n = len(temperature)
    time = torch.rand(n, generator=g) * 2 + 0.2
    conc = torch.rand(n, 3, generator=g)
    k1 = torch.exp(6.0 - 2200.0 / temperature)
    k2 = torch.exp(8.5 - 3600.0 / temperature)
    b = k1 / (k2 - k1 + 1e-6) * (torch.exp(-k1 * time) - torch.exp(-k2 * time))
    y = 4 * b.clamp(0, 1) * (0.7 + 0.3 * conc[:, 0]) - 0.3 * conc[:, 1] * conc[:, 2]
    x = torch.cat([((temperature - 400) / 60)[:, None], time[:, None], conc], 1)
    return x, y + 0.03 * torch.randn(n, generator=g)


def train_batch(step, n):
    g = torch.Generator().manual_seed(500 + step)
    return simulate(300 + 200 * torch.rand(n, generator=g), g)


def test_set(n=1024):
    """A sweep from cold to hot."""
    g = torch.Generator().manual_seed(9)
    return simulate(torch.linspace(300, 500, n), g)

import math

import torch
import torch.distributed as dist


def make_series(n_series=16, length=160, n_feat=3, seed=5):
    """Load curves of substations; the big ones come first in the archive."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length)[None, :, None].float()
    phase = torch.rand(n_series, 1, n_feat, generator=g) * 6.28
    level = torch.linspace(30.0, 2.0, n_series)[:, None, None] * torch.tensor([1.0, 0.5, 0.1])
    wave = torch.sin(2 * math.pi * t / 24 + phase) + 0.5 * torch.sin(2 * math.pi * t / 7 + 2 * phase)
    noise = torch.randn(n_series, length, n_feat, generator=g)
    return level * (1 + 0.15 * wave + 0.03 * noise)


class Scaler:
    """Standardisation per feature over the series of all ranks."""

    def fit(self, x):
        x = x.double().flatten(0, 1)
        n = torch.tensor(float(len(x)), dtype=torch.float64)
        total = x.sum(0)
        dist.all_reduce(n)
        dist.all_reduce(total)
        self.mean = total / n
        var = (x - self.mean).square().sum(0)
        dist.all_reduce(var)
        self.std = (var / n).sqrt()
        return self

    def transform(self, x):
        return ((x - self.mean) / self.std).float()

    def inverse(self, z):
        return (z * self.std + self.mean).float()

    def state_dict(self):
        return {"mean": self.mean, "std": self.std}

    def load_state_dict(self, state):
        self.mean, self.std = state["mean"].clone(), state["std"].clone()

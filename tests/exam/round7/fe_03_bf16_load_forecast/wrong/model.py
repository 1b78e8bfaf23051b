import math

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class CalendarFeatures(nn.Module):
    """Sine and cosine of the hour stamp for the daily and weekly cycle."""

    def __init__(self, periods=(24.0, 168.0), harmonics=1):
        super().__init__()
        freqs = [2 * math.pi * k / p for p in periods for k in range(1, harmonics + 1)]
        self.freqs = freqs
        self.width = 2 * len(freqs)

    def forward(self, hours):
        freqs = torch.tensor(self.freqs, dtype=torch.float64, device=hours.device)
        angle = hours.double().unsqueeze(-1) * freqs
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class Forecaster(nn.Module):
    def __init__(self, sites, dim=48):
        super().__init__()
        self.calendar = CalendarFeatures()
        self.site = nn.Embedding(sites, dim)
        self.time = nn.Linear(self.calendar.width, dim)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(2)
        )
        self.readout = nn.Linear(dim, 1)

    def forward(self, site, hours):
        time = self.calendar(hours).to(self.time.weight.dtype)
        x = self.site(site) + self.time(time)
        for layer in self.body:
            x = x + layer(x)
        return self.readout(x).squeeze(-1)


def build(sites, seed):
    torch.manual_seed(seed)
    model = Forecaster(sites)
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    root = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for layer in model.body:
        fully_shard(layer, mp_policy=inner)
    fully_shard(model, mp_policy=root)
    return model

"""The series: what the moon and the sun do, and the wind on top of it. Windows of it are the samples."""

from __future__ import annotations

import math

import torch

from .settings import SeriesSettings

# period in hours, amplitude in metres
CONSTITUENTS = {
    "M2": (12.4206, 1.10),
    "S2": (12.0000, 0.38),
    "N2": (12.6583, 0.22),
    "K1": (23.9345, 0.31),
    "O1": (25.8193, 0.19),
    "M4": (6.2103, 0.09),
}


def levels(settings: SeriesSettings) -> torch.Tensor:
    """Hourly levels [hours], scaled to a standard deviation of one."""
    generator = torch.Generator().manual_seed(settings.seed)
    hours = torch.arange(settings.hours, dtype=torch.float64)
    level = torch.zeros_like(hours)
    for period, amplitude in CONSTITUENTS.values():
        phase = 2 * math.pi * torch.rand((), generator=generator, dtype=torch.float64)
        level += amplitude * torch.cos(2 * math.pi * hours / period + phase)
    level += surge(settings.hours, generator)
    return ((level - level.mean()) / level.std()).float()


def surge(hours: int, generator: torch.Generator) -> torch.Tensor:
    """The wind: a first-order process that forgets within a day or so."""
    gusts = 0.12 * torch.randn(hours, generator=generator, dtype=torch.float64)
    value, result = 0.0, []
    for gust in gusts.tolist():
        value = 0.93 * value + gust
        result.append(value)
    return torch.tensor(result, dtype=torch.float64)


def windows(settings: SeriesSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out windows [number, past + future]; no hour is in both."""
    series = levels(settings)
    length = settings.past + settings.future
    border = int(0.8 * len(series))
    generator = torch.Generator().manual_seed(settings.seed + 1)
    begin = torch.randint(0, border - length, (settings.windows,), generator=generator)
    held_out = torch.linspace(border, len(series) - length, settings.held_out).long()
    index = torch.arange(length)
    return series[begin[:, None] + index], series[held_out[:, None] + index]


def split(rows: torch.Tensor, past: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What is known and what is to be forecast."""
    return rows[:, :past], rows[:, past:]

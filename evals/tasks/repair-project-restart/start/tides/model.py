"""A transformer over patches of the series; the last patch's output is the forecast."""

from __future__ import annotations

import torch
from torch import nn

from .layers import Block, RMSNorm, initialise
from .settings import Settings


class Forecaster(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        model, series = settings.model, settings.series
        if series.past % model.patch:
            raise ValueError(f"{series.past} hours are not made of patches of {model.patch}")
        self.patch = model.patch
        self.enter = nn.Linear(model.patch, model.width)
        patches = series.past // model.patch
        self.blocks = nn.ModuleList(Block(model.width, model.heads, patches, causal=False) for _ in range(model.layers))
        self.norm = RMSNorm(model.width)
        self.leave = nn.Linear(model.width, series.future)
        initialise(self, model.layers, std=0.08)

    def forward(self, past: torch.Tensor) -> torch.Tensor:  # [n, past] -> [n, future]
        x = self.enter(past.unflatten(1, (-1, self.patch)))
        for block in self.blocks:
            x = block(x)
        return past[:, -1:] + self.leave(self.norm(x[:, -1]))

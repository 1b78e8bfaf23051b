"""A small N-BEATS: every block explains a part of the history and adds its part of the forecast."""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, history, horizon, width, last):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(history, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.back = None if last else nn.Linear(width, history)
        self.fore = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.body(x)
        return (torch.zeros_like(x) if self.back is None else self.back(h)), self.fore(h)


class Forecaster(nn.Module):
    def __init__(self, history, horizon, width=32, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(history, horizon, width, last=i == depth - 1) for i in range(depth))
        self.level = nn.Parameter(torch.zeros(horizon))

    def forward(self, x):
        forecast = self.level
        for block in self.blocks:
            back, fore = block(x)
            x = x - back
            forecast = forecast + fore
        return forecast

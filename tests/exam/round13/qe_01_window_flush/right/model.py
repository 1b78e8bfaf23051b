import torch
from torch import nn


class MixBlock(nn.Module):
    """One mixing layer over the sensor axis, one over the feature axis."""

    def __init__(self, sensors: int, width: int):
        super().__init__()
        self.norm_s = nn.LayerNorm(width)
        self.over_sensors = nn.Linear(sensors, sensors, bias=False)
        self.norm_f = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        y = self.over_sensors(self.norm_s(x).transpose(1, 2)).transpose(1, 2)
        x = x + y
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm_f(x))))


class SensorMixer(nn.Module):
    def __init__(self, sensors=8, channels=4, width=32, depth=2):
        super().__init__()
        self.stem = nn.Linear(channels, width)
        self.blocks = nn.ModuleList(MixBlock(sensors, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

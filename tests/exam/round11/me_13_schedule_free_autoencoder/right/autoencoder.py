import torch
import torch.nn as nn


class TimeAutoencoder(nn.Module):
    def __init__(self, channels=3, length=32, code=6, width=40):
        super().__init__()
        self.channels, self.length = channels, length
        self.encode = nn.Sequential(nn.Linear(channels * length, width), nn.SiLU(), nn.Linear(width, code))
        self.decode = nn.Sequential(nn.Linear(code, width), nn.SiLU(), nn.Linear(width, channels * length))
        self.mean = nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x):
        flat = (x - self.mean).flatten(1)
        return self.decode(self.encode(flat)).view_as(x) + self.mean


def sensor_windows(n, seed, channels=3, length=32):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, length)
    freq = 1 + 3 * torch.rand(n, 1, 1, generator=g)
    phase = 6.28 * torch.rand(n, 1, 1, generator=g)
    gain = torch.tensor([1.0, 0.6, 0.3])[:, None]
    lag = torch.tensor([0.0, 0.7, 1.4])[:, None]
    return gain * torch.sin(6.28 * freq * t + phase + lag) + 0.5 + 0.1 * torch.randn(n, channels, length, generator=g)

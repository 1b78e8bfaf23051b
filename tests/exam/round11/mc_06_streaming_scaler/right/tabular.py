import torch
import torch.nn as nn


class StreamingScaler(nn.Module):
    """Standardises raw columns with mean and variance gathered over the stream (Chan's merge)."""

    def __init__(self, columns):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(columns, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(columns, dtype=torch.float64))

    @torch.no_grad()
    def update(self, n, total, total_sq):
        batch_mean = total / n
        batch_m2 = total_sq - n * batch_mean ** 2
        delta = batch_mean - self.mean
        new = self.count + n
        self.m2 += batch_m2 + delta ** 2 * self.count * n / new
        self.mean += delta * n / new
        self.count += n

    def forward(self, x):
        std = (self.m2 / self.count.clamp_min(1)).sqrt().clamp_min(1e-6)
        return ((x.double() - self.mean) / std).float()


class TabularNet(nn.Module):
    def __init__(self, columns, width=32):
        super().__init__()
        self.scaler = StreamingScaler(columns)
        self.first = nn.Linear(columns, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.relu(self.first(self.scaler(x)))
        h = h + torch.relu(self.second(h))
        return self.out(h)

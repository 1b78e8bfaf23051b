"""Room acoustics: predict decay times per band from geometry and absorption."""
import torch
from torch import nn


class ReverbNet(nn.Module):
    def __init__(self, features=10, width=32, bands=4):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(2))
        self.head = nn.Linear(width, bands)

    def forward(self, x):
        x = self.stem(x)
        for part in self.body:
            x = x + part(x)
        return self.head(x)


class ReverbTask:
    def __init__(self, size=32):
        self.size = size
        self.mix = torch.randn(10, 4, generator=torch.Generator().manual_seed(3))

    def _rooms(self, seed, n):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 10, generator=g)
        y = torch.tanh(x @ self.mix * 0.5) + 0.3 * (x[:, :4] * x[:, 4:8])
        return x, y + 0.05 * torch.randn(n, 4, generator=g)

    def batch(self, step):
        return self._rooms(500 + step, self.size)

    def held_out(self):
        return self._rooms(1, 128)

    @staticmethod
    def loss(prediction, target):
        return nn.functional.mse_loss(prediction, target)

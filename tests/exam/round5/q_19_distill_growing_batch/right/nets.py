import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, bands=20, d=24, depth=3, classes=5):
        super().__init__()
        self.inp = nn.Linear(bands, d)
        self.layers = nn.ModuleList(Residual(d) for _ in range(depth))
        self.out = nn.Linear(d, classes)

    def forward(self, x, hidden=False):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h)
        return (self.out(h), h) if hidden else self.out(h)

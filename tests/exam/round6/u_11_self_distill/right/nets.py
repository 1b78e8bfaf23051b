import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, pixels=64, dim=48, prototypes=32):
        super().__init__()
        self.inp = nn.Linear(pixels, dim)
        self.mid = nn.ModuleList(nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU()) for _ in range(2))
        self.bottleneck = nn.Linear(dim, 16)
        self.prototypes = nn.Linear(16, prototypes, bias=False)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.mid:
            h = h + layer(h)
        return self.prototypes(F.normalize(self.bottleneck(h), dim=-1))

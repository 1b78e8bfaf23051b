import torch
import torch.nn as nn


class Gated(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.wide = nn.Linear(dim, 4 * dim)
        self.back = nn.Linear(2 * dim, dim)

    def forward(self, x):
        a, b = self.wide(self.norm(x)).chunk(2, -1)
        return x + self.back(torch.nn.functional.silu(a) * b)


class Net(nn.Module):
    def __init__(self, feat=9, dim=16, depth=3):
        super().__init__()
        self.inp = nn.Linear(feat, dim)
        self.layers = nn.ModuleList(Gated(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 2)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

import torch
import torch.nn as nn


class Residual(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.a, self.b = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.5))

    def forward(self, x):
        return x + self.scale * self.b(torch.nn.functional.gelu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, cfg, classes=6):
        super().__init__()
        self.embed = nn.Linear(cfg.dim, cfg.dim)
        self.layers = nn.ModuleList(Residual(cfg.dim, cfg.hidden) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.dim)
        self.head = nn.Linear(cfg.dim, classes)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

import torch
import torch.nn as nn


class DeepFM(nn.Module):
    """Factorisation machine plus a small MLP over user, item and context fields."""

    def __init__(self, sizes=(24, 30, 6), dim=12):
        super().__init__()
        self.linear = nn.ModuleList(nn.Embedding(n, 1) for n in sizes)
        self.factors = nn.ModuleList(nn.Embedding(n, dim) for n in sizes)
        self.mlp = nn.Sequential(nn.Linear(len(sizes) * dim, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 1))
        for table in self.linear:
            nn.init.zeros_(table.weight)
        for table in self.factors:
            nn.init.normal_(table.weight, std=0.2)

    def forward(self, fields):
        first = sum(table(fields[:, i]) for i, table in enumerate(self.linear)).squeeze(1)
        v = torch.stack([table(fields[:, i]) for i, table in enumerate(self.factors)], 1)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return first + pairs + self.mlp(v.flatten(1)).squeeze(1)

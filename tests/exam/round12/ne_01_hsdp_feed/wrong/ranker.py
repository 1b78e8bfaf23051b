import torch
from torch import nn


class CrossBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        return x + torch.sigmoid(self.gate(h)) * self.value(h)


class ClickRanker(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.tables = nn.Embedding(cfg.n_fields * cfg.buckets, cfg.dim)
        self.register_buffer("offset", torch.arange(cfg.n_fields) * cfg.buckets, persistent=False)
        self.blocks = nn.ModuleList([CrossBlock(cfg.dim) for _ in range(cfg.layers)])
        self.head = nn.Linear(cfg.dim, 1)

    def forward(self, fields):
        x = self.tables(fields + self.offset).sum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

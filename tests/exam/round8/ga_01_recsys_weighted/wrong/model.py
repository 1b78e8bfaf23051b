import torch
import torch.nn as nn

from data import N_ITEMS, N_USERS


class Tower(nn.Module):
    def __init__(self, n, dim):
        super().__init__()
        self.emb = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, idx):
        h = self.emb(idx)
        return h + self.mlp(h)


class TwoTower(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.user = Tower(N_USERS, dim)
        self.item = Tower(N_ITEMS, dim)
        self.bias = nn.Parameter(torch.zeros(1))
        self.dim = dim

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) / self.dim**0.5 + self.bias

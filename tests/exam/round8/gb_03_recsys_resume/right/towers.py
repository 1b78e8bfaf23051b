import torch
import torch.nn as nn


class Tower(nn.Module):
    def __init__(self, rows, extra, dim):
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        self.mlp = nn.Sequential(nn.Linear(dim + extra, 48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, ids, feats):
        return self.mlp(torch.cat([self.table(ids), feats], dim=-1))


class Recommender(nn.Module):
    def __init__(self, users, items, extra=4, dim=16):
        super().__init__()
        self.user = Tower(users, extra, dim)
        self.item = Tower(items, extra, dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        u = self.user(batch["user"], batch["user_feats"])
        v = self.item(batch["item"], batch["item_feats"])
        return (u * v).sum(-1) / u.shape[-1] ** 0.5 + self.bias

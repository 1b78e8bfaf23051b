import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, n_ids, n_feats, dim):
        super().__init__()
        self.ids = nn.Embedding(n_ids, dim)
        self.feats = nn.Linear(n_feats, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, ids, feats):
        return self.fc2(F.relu(self.fc1(self.ids(ids) + self.feats(feats))))


class TwoTower(nn.Module):
    def __init__(self, users, items, n_feats=6, dim=16):
        super().__init__()
        self.user, self.item = Tower(users, n_feats, dim), Tower(items, n_feats, dim)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, u, uf, i, xf):
        return self.scale * (self.user(u, uf) * self.item(i, xf)).sum(-1)

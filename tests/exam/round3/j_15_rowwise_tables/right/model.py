import torch
import torch.nn as nn

from ratings import ITEMS, TAGS, USERS


class Tables(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.user = nn.Embedding(USERS, dim)
        self.item = nn.Embedding(ITEMS, dim)
        self.tag = nn.Embedding(TAGS, dim)
        for t in (self.user, self.item, self.tag):
            nn.init.normal_(t.weight, std=0.1)

    def forward(self, u, i, t):
        return self.user(u), self.item(i), self.tag(t)


class Ranker(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.tables = Tables(dim)
        self.dense = nn.Sequential(nn.Linear(4 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, u, i, t):
        u, i, t = self.tables(u, i, t)
        return 3 + (u * i).sum(-1) + self.dense(torch.cat([u, i, t, u * i], -1)).squeeze(-1)

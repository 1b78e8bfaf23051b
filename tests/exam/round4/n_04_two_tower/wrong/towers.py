import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, n, dim=16):
        super().__init__()
        self.emb = nn.Embedding(n, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, idx):
        e = self.emb(idx)
        return F.normalize(e + self.mlp(e), dim=1)


class TwoTower(nn.Module):
    def __init__(self, users, items):
        super().__init__()
        self.user, self.item = Tower(users), Tower(items)

    def forward(self, pairs):
        return self.user(pairs[:, 0]), self.item(pairs[:, 1])

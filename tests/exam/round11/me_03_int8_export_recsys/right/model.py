import torch
import torch.nn as nn


class Tower(nn.Module):
    def __init__(self, n_ids, dim, out):
        super().__init__()
        self.emb = nn.Embedding(n_ids, dim)
        self.fc1 = nn.Linear(dim, 48)
        self.fc2 = nn.Linear(48, out)

    def forward(self, ids):
        return self.fc2(torch.relu(self.fc1(self.emb(ids))))


class TwoTower(nn.Module):
    def __init__(self, users=120, items=90, dim=24, out=16):
        super().__init__()
        self.user = Tower(users, dim, out)
        self.item = Tower(items, dim, out)
        self.bias = nn.Embedding(items, 1)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)

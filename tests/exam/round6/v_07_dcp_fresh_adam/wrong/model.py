import torch
import torch.nn as nn
import torch.nn.functional as F


class FactorTower(nn.Module):
    def __init__(self, ids, dim):
        super().__init__()
        self.table = nn.Embedding(ids, dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, i):
        x = self.table(i)
        return F.normalize(x + self.fc2(torch.relu(self.fc1(x))), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, users=200, items=120, dim=16):
        super().__init__()
        self.user = FactorTower(users, dim)
        self.item = FactorTower(items, dim)
        self.bias = nn.Embedding(items, 1)
        self.scale = nn.Parameter(torch.tensor([5.0]))

    def forward(self, u, i):
        return self.scale * (self.user(u) * self.item(i)).sum(-1) + self.bias(i).squeeze(-1)

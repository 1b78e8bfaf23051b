import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.table = nn.Embedding(count, width)
        self.mix = nn.Linear(width, width)
        nn.init.normal_(self.table.weight, std=0.2)

    def forward(self, ids):
        e = self.table(ids)
        return e + torch.tanh(self.mix(e))


class Ranker(nn.Module):
    def __init__(self, users, items, width=16):
        super().__init__()
        self.user, self.item = Tower(users, width), Tower(items, width)

    def forward(self, user, positive, negative):
        u = self.user(user)
        good = (u * self.item(positive)).sum(-1)
        bad = torch.einsum("bd,bnd->bn", u, self.item(negative))
        return good[:, None] - bad

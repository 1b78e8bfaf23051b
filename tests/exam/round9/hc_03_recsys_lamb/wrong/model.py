import torch
import torch.nn as nn


class RatingModel(nn.Module):
    def __init__(self, users=400, items=300, dim=16):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, user, item):
        u, v = self.user(user), self.item(item)
        return self.mlp(torch.cat([u, v, u * v], -1)).squeeze(-1)


def interactions(n=6000, users=400, items=300, seed=3):
    """Zipf-like ids: the popular users and items come first in the tables."""
    g = torch.Generator().manual_seed(seed)
    u = (users * torch.rand(n, generator=g) ** 2.5).long()
    i = (items * torch.rand(n, generator=g) ** 2.5).long()
    a, b = torch.randn(users, 4, generator=g), torch.randn(items, 4, generator=g)
    y = (a[u] * b[i]).sum(-1) + 0.1 * torch.randn(n, generator=g)
    return u, i, y

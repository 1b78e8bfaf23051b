import torch
import torch.nn as nn


class Ranker(nn.Module):
    def __init__(self, n_user=240, n_item=160, dim=16):
        super().__init__()
        self.user = nn.Embedding(n_user, dim)
        self.item = nn.Embedding(n_item, dim)
        nn.init.normal_(self.user.weight, std=0.4)
        nn.init.normal_(self.item.weight, std=0.4)
        self.mlp = nn.Sequential(nn.Linear(3 * dim, 48), nn.ReLU(), nn.Linear(48, 1))

    def tables(self):
        return [self.user.weight, self.item.weight]

    def forward(self, user, item):
        u, i = self.user(user), self.item(item)
        return self.mlp(torch.cat([u, i, u * i], dim=-1)).squeeze(-1)


class ClickLog:
    """Implicit feedback; a few users and items make up most of the log."""

    def __init__(self, n_user=240, n_item=160, seed=3):
        g = torch.Generator().manual_seed(seed)
        # a latent factor model in which the factors have very different sizes
        scale = torch.linspace(2.0, 0.1, 6)
        self.u = torch.randn(n_user, 6, generator=g) * scale
        self.i = torch.randn(n_item, 6, generator=g) * scale
        self.g = torch.Generator().manual_seed(seed + 1)

    def draw(self, size):
        user = (torch.rand(size, generator=self.g) ** 2 * self.u.shape[0]).long()
        item = (torch.rand(size, generator=self.g) ** 2 * self.i.shape[0]).long()
        logit = (self.u[user] * self.i[item]).sum(-1)
        label = (torch.rand(size, generator=self.g) < torch.sigmoid(logit)).float()
        return user, item, label

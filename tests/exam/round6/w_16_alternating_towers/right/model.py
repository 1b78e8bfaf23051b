import torch
import torch.nn as nn


class SideTower(nn.Module):
    def __init__(self, n, d_feat, dim=16):
        super().__init__()
        self.id = nn.Embedding(n, dim)
        self.feat = nn.Sequential(nn.Linear(d_feat, 32), nn.ReLU(), nn.Linear(32, dim))
        self.bias = nn.Embedding(n, 1)
        nn.init.normal_(self.id.weight, std=0.3)
        nn.init.zeros_(self.bias.weight)

    def forward(self, ids, feat):
        return self.id(ids) + self.feat(feat), self.bias(ids)[:, 0]


class Ratings:
    def __init__(self, n_user=100, n_item=60, seed=12):
        g = torch.Generator().manual_seed(seed)
        self.user_feat, self.item_feat = torch.randn(n_user, 5, generator=g), torch.randn(n_item, 7, generator=g)
        self.u, self.i = torch.randn(n_user, 3, generator=g), torch.randn(n_item, 3, generator=g)
        self.g = torch.Generator().manual_seed(seed + 1)

    def draw(self, size=96):
        user = torch.randint(len(self.u), (size,), generator=self.g)
        item = torch.randint(len(self.i), (size,), generator=self.g)
        y = (self.u[user] * self.i[item]).sum(1) + 0.3 * torch.randn(size, generator=self.g)
        return user, item, y

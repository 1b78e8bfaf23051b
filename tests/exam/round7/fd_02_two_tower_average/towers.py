import torch
from torch import nn
import torch.nn.functional as F


class Tower(nn.Module):
    def __init__(self, n_ids, n_feats, dim=32):
        super().__init__()
        self.emb = nn.Embedding(n_ids, dim)
        self.feats = nn.Linear(n_feats, dim)
        self.mlp = nn.Sequential(nn.Linear(2 * dim, 64), nn.GELU(), nn.Linear(64, dim))
        nn.init.normal_(self.emb.weight, std=0.1)

    def forward(self, ids, feats):
        h = torch.cat([self.emb(ids), self.feats(feats)], -1)
        return F.normalize(self.mlp(h), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, n_users, n_items, n_feats):
        super().__init__()
        self.user = Tower(n_users, n_feats)
        self.item = Tower(n_items, n_feats)
        self.bias = nn.Embedding(n_items, 1)
        nn.init.zeros_(self.bias.weight)

    def forward(self, uid, ufeat, iid, ifeat):
        u = self.user(uid, ufeat)
        v = self.item(iid, ifeat)
        return 5.0 * (u * v).sum(-1) + self.bias(iid).squeeze(-1)

import torch
import torch.nn as nn


class Tower(nn.Module):
    def __init__(self, n_ids, n_feat, dim):
        super().__init__()
        self.emb = nn.Embedding(n_ids, dim)
        nn.init.normal_(self.emb.weight, std=0.1)
        self.feat = nn.Linear(n_feat, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, ids, feats):
        return self.out(torch.relu(self.emb(ids) + self.feat(feats)))


class TwoTower(nn.Module):
    def __init__(self, users, items, n_feat=6, dim=24):
        super().__init__()
        self.user = Tower(users, n_feat, dim)
        self.item = Tower(items, n_feat, dim)

    def forward(self, user, user_feat, item, item_feat):
        return (self.user(user, user_feat) * self.item(item, item_feat)).sum(-1)

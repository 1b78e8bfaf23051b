import torch
import torch.nn as nn
import torch.nn.functional as F


class Towers(nn.Module):
    def __init__(self, users=120, items=90, dim=16):
        super().__init__()
        self.users = nn.Embedding(users, dim)
        self.items = nn.Embedding(items, dim)
        self.user_mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.item_mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.log_temp = nn.Parameter(torch.full((1,), -1.5))

    def forward(self, u, i):
        a = F.normalize(self.user_mlp(self.users(u)) + self.users(u), dim=-1)
        b = F.normalize(self.item_mlp(self.items(i)) + self.items(i), dim=-1)
        return a, b, self.log_temp.exp()


class Popularity:
    """Exponential frequency estimate of each item, for the logQ correction of in-batch negatives."""

    def __init__(self, items, rate=0.05):
        self.freq, self.rate = torch.full((items,), 1.0 / items), rate

    def update(self, ids):
        seen = torch.bincount(ids, minlength=len(self.freq)).float() / len(ids)
        self.freq.lerp_(seen, self.rate)

    def log_q(self, ids):
        return self.freq[ids].clamp_min(1e-6).log()

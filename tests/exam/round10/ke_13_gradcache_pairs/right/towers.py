import torch
import torch.nn as nn
import torch.nn.functional as F


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 16, 3, 2, 1), nn.GELU())
        self.out = nn.Linear(16 * 9, dim)

    def forward(self, x):
        return F.normalize(self.out(self.body(x).flatten(1)), dim=1)


class TextTower(nn.Module):
    def __init__(self, dim, vocab=24):
        super().__init__()
        self.emb = nn.Embedding(vocab, 24)
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, ids):
        return F.normalize(self.mlp(self.emb(ids).mean(1)), dim=1)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, sims):
        return sims * self.log_scale.exp()

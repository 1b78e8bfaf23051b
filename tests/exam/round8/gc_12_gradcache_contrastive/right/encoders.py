import torch
import torch.nn as nn
import torch.nn.functional as F


class ImageEncoder(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.GELU())
        self.out = nn.Linear(24 * 9, d)

    def forward(self, x):
        return F.normalize(self.out(self.conv(x).flatten(1)), dim=-1)


class TextEncoder(nn.Module):
    def __init__(self, vocab=30, d=24):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, 32)
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, d))

    def forward(self, ids):
        return F.normalize(self.mlp(self.emb(ids)), dim=-1)

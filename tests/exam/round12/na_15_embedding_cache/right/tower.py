import torch
import torch.nn as nn
import torch.nn.functional as F


class TowerLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v))
        return x + self.ff(x)


class Tower(nn.Module):
    """One text encoder for both sides; a type embedding tells queries from documents."""

    def __init__(self, vocab, d=32, depth=2, out=24):
        super().__init__()
        self.word, self.side = nn.Embedding(vocab, d), nn.Embedding(2, d)
        self.layers = nn.ModuleList(TowerLayer(d) for _ in range(depth))
        self.out = nn.Linear(d, out, bias=False)

    def forward(self, ids, side):
        x = self.word(ids) + self.side(side)[:, None]
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.out(x.mean(1)), dim=-1)

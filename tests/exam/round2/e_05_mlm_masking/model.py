import torch, torch.nn as nn, torch.nn.functional as F
from data import VOCAB, T


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.att = nn.Linear(d, 3 * d, bias=False)
        self.norm = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.att(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return x + self.ff(x)


class MaskedLM(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB + 1, d), nn.Parameter(torch.randn(T, d) * 0.1)
        self.layers = nn.ModuleList(Layer(d) for _ in range(2))
        self.out = nn.Linear(d, VOCAB + 1)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for l in self.layers:
            x = l(x)
        return self.out(x)

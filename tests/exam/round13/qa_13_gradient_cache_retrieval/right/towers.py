import torch
import torch.nn as nn
import torch.nn.functional as F


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Tower(nn.Module):
    """Attention pooling over word vectors, then a small residual network, unit length."""

    def __init__(self, vocab, d=32, depth=2, out=16):
        super().__init__()
        self.words = nn.Embedding(vocab, d)
        self.score = nn.Parameter(torch.randn(d) * 0.1)
        self.layers = nn.ModuleList(Residual(d) for _ in range(depth))
        self.out = nn.Linear(d, out, bias=False)

    def forward(self, ids, mask):
        w = self.words(ids)
        weight = (w @ self.score).masked_fill(~mask, float("-inf")).softmax(-1)
        x = (weight[..., None] * w).sum(1)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.out(x), dim=-1)

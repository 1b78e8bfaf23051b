import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Layer(nn.Module):
    def __init__(self, dim, heads, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, dim * 2), nn.GELU(), nn.Dropout(p), nn.Linear(dim * 2, dim), nn.Dropout(p))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(a.transpose(1, 2).reshape(b, t, d)), self.p, self.training)
        return x + self.ff(self.ln2(x))


class SASRec(nn.Module):
    """Next-item model; every layer is recomputed in the backward pass to save activations."""

    def __init__(self, items=120, dim=32, heads=2, layers=3, length=16, dropout=0.3, recompute=True):
        super().__init__()
        self.item = nn.Embedding(items, dim)
        nn.init.normal_(self.item.weight, std=0.05)
        self.pos = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.recompute = recompute

    def forward(self, seq):
        x = self.item(seq) + self.pos[: seq.shape[1]]
        for layer in self.layers:
            if self.recompute and self.training:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.norm(x) @ self.item.weight.T

import torch
import torch.nn as nn
import torch.nn.functional as F


class Stage(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.q = nn.Linear(d, d, bias=False)
        self.kv = nn.Linear(d, 2 * d, bias=False)
        self.o = nn.Linear(d, d, bias=False)
        self.ff = nn.Sequential(nn.RMSNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.gate = nn.Parameter(torch.ones(d))

    def forward(self, x):
        h = self.norm(x)
        k, v = self.kv(h).chunk(2, -1)
        x = x + self.gate * self.o(F.scaled_dot_product_attention(self.q(h), k, v, is_causal=True))
        return x + self.gate * self.ff(x)


class GrowingLM(nn.Module):
    def __init__(self, depth, vocab=40, d=36, ctx=20):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(ctx, d)
        self.stages = nn.ModuleList(Stage(d) for _ in range(depth))
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        h = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for s in self.stages:
            h = s(h)
        return self.head(h)

import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 3 * dim, bias=False)
        self.down = nn.Linear(3 * dim, dim, bias=False)
        self.gain1 = nn.Parameter(torch.ones(dim))
        self.gain2 = nn.Parameter(torch.ones(dim))

    def split(self, t):
        b, n, d = t.shape
        return t.view(b, n, self.heads, d // self.heads).transpose(1, 2)

    def forward(self, x):
        h = F.rms_norm(x, x.shape[-1:], self.gain1)
        a = F.scaled_dot_product_attention(self.split(self.q(h)), self.split(self.k(h)), self.split(self.v(h)), is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(x.shape))
        h = F.rms_norm(x, x.shape[-1:], self.gain2)
        return x + self.down(F.relu(self.up(h)).square())


class LM(nn.Module):
    """Tied embeddings; hidden matrices go to Muon, the rest to AdamW."""

    def __init__(self, vocab=40, dim=30, heads=3, layers=2, ctx=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        nn.init.normal_(self.emb.weight, std=0.3)
        self.pos = nn.Parameter(torch.randn(ctx, dim) * 0.1)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(layers)])

    def forward(self, ids):
        x = self.emb(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return F.rms_norm(x, x.shape[-1:]) @ self.emb.weight.T

import torch
import torch.nn as nn
import torch.nn.functional as F


def rotate(x):
    t, d = x.shape[-2], x.shape[-1] // 2
    angle = torch.arange(t)[:, None] * (100.0 ** (-torch.arange(d) / d))[None]
    a, b = x[..., :d], x[..., d:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 3 * d, bias=False), nn.Linear(3 * d, d, bias=False)

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.n2(x))).square())


class GPT(nn.Module):
    def __init__(self, vocab=40, d=32, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(Block(d, 4) for _ in range(depth))
        self.norm = nn.RMSNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x))

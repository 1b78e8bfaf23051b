import torch
import torch.nn as nn
import torch.nn.functional as F


class Mixer(nn.Module):
    """Token mixing with a learned matrix, then a gated feed forward."""

    def __init__(self, dim, length):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.time = nn.Linear(length, length)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.time(self.n1(x).transpose(1, 2)).transpose(1, 2)
        a, b = self.up(self.n2(x)).chunk(2, -1)
        return x + self.down(a * F.silu(b))


class Net(nn.Module):
    def __init__(self, vocab, length, dim, depth, out):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.body = nn.ModuleList(Mixer(dim, length) for _ in range(depth))
        self.out = nn.Linear(dim, out)

    def forward(self, ids):
        x = self.emb(ids)
        for m in self.body:
            x = m(x)
        return self.out(x)

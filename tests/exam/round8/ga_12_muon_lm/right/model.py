import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedRecurrence(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.inp = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.decay = nn.Parameter(torch.linspace(-2, 3, dim))

    def forward(self, x):
        v, g = self.inp(self.norm(x)).chunk(2, -1)
        lam, h, hs = self.decay.sigmoid(), torch.zeros_like(v[:, 0]), []
        for t in range(v.shape[1]):
            h = lam * h + (1 - lam) * v[:, t]
            hs.append(h)
        return x + self.out(torch.stack(hs, 1) * F.silu(g))


class RecurrentLM(nn.Module):
    def __init__(self, vocab=24, dim=24, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(GatedRecurrence(dim) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)

    def forward(self, x):
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return F.linear(self.norm(h), self.embed.weight)

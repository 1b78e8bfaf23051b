import torch
import torch.nn as nn
import torch.nn.functional as F


class EncoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.o = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        y = self.ln(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + self.mlp(x)


class Encoder(nn.Module):
    def __init__(self, vocab, length, dim=24, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.place = nn.Parameter(0.2 * torch.randn(length, dim))
        self.layers = nn.ModuleList(EncoderLayer(dim) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids) + self.place
        for layer in self.layers:
            x = layer(x)
        return x.mean(1)


class Classifier(nn.Module):
    def __init__(self, encoder, dim, classes):
        super().__init__()
        self.encoder = encoder
        self.score = nn.Linear(dim, classes)

    def forward(self, ids):
        return self.score(self.encoder(ids))

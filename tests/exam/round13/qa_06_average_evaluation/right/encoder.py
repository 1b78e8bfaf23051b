import torch.nn as nn
import torch.nn.functional as F

from task import LENGTH, VOCAB


class EncoderLayer(nn.Module):
    def __init__(self, d=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = self.n1(x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.n2(x + self.ff(x))


class Encoder(nn.Module):
    def __init__(self, d=32, depth=2):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, d), nn.Embedding(LENGTH, d)
        self.layers = nn.ModuleList(EncoderLayer(d) for _ in range(depth))
        self.head = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d), nn.Linear(d, VOCAB, bias=False))

    def forward(self, ids):
        x = self.words(ids) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

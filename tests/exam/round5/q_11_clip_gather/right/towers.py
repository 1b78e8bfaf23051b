import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.ff(self.n2(x))


class Tower(nn.Module):
    def __init__(self, inp, d, out, depth):
        super().__init__()
        self.inp = inp
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.out = nn.Linear(d, out, bias=False)

    def forward(self, x):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h)
        return F.normalize(self.out(h.mean(1)), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self, vocab=20, pixels=12, d=16, out=12):
        super().__init__()
        self.image = Tower(nn.Linear(pixels, d), d, out, 1)
        self.text = Tower(nn.Embedding(vocab, d), d, out, 1)
        self.log_scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, img, txt):
        return self.image(img), self.text(txt), self.log_scale.exp()

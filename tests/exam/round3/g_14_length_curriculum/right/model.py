import torch
import torch.nn as nn
import torch.nn.functional as F


def alibi(heads, t):
    slope = 2.0 ** -torch.arange(1, heads + 1)
    distance = torch.arange(t)[None, :] - torch.arange(t)[:, None]
    bias = slope[:, None, None] * distance
    return bias.masked_fill(distance > 0, float("-inf"))


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 3 * d, bias=False), nn.Linear(3 * d, d, bias=False)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class AlibiLM(nn.Module):
    def __init__(self, vocab, d=24, depth=2, heads=3):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(Layer(d, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x, bias = self.embed(ids), alibi(self.heads, ids.shape[1])
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x))

"""A small Llama: rotary tables and a causal mask as buffers that no checkpoint holds; weights are filled one by one, by name."""

import zlib

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads, self.length = heads, length
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        for name in ("cos", "sin", "mask"):
            self.register_buffer(name, None, persistent=False)
        self.make_tables()

    def make_tables(self, device=None):
        size = self.wq.in_features // self.heads
        rates = 1e4 ** (-torch.arange(0, size, 2, device=device).float() / size)
        angle = torch.outer(torch.arange(self.length, device=device).float(), rates).repeat(1, 2)
        self.cos, self.sin = angle.cos(), angle.sin()
        self.mask = torch.full((self.length, self.length), -1e4, device=device).triu(1)

    def turn(self, x):
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], dim=-1) * self.sin

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (w(x).view(n, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, attn_mask=self.mask)
        return self.wo(y.transpose(1, 2).reshape(n, t, c))


class Layer(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.input_norm, self.output_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, length)
        self.w1, self.w3 = nn.Linear(width, 96, bias=False), nn.Linear(width, 96, bias=False)
        self.w2 = nn.Linear(96, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.input_norm(x))
        y = self.output_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Llama(nn.Module):
    def __init__(self, vocab=64, width=48, heads=4, length=16, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Layer(width, heads, length) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.out = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))


def initial(name, shape, seed):
    """The initial value of the parameter of that name."""
    if len(shape) == 1:
        return torch.ones(shape)
    gen = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return 0.05 * torch.randn(shape, generator=gen)


@torch.no_grad()
def init_weights(model, seed):
    for name, parameter in model.named_parameters():
        parameter.copy_(initial(name, parameter.shape, seed))

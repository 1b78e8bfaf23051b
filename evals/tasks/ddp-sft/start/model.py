"""A small decoder: rotary positions, RMSNorm, gated MLP, head tied to the embedding."""

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        size = width // heads
        angle = torch.outer(torch.arange(length).float(), 10000.0 ** (-torch.arange(0, size, 2).float() / size))
        self.register_buffer("cos", angle.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angle.sin().repeat(1, 2), persistent=False)

    def turn(self, x):
        first, second = x.chunk(2, dim=-1)
        return x * self.cos[: x.shape[2]] + torch.cat([-second, first], dim=-1) * self.sin[: x.shape[2]]

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class Layer(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, length)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, vocab, length, width=48, heads=4, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(Layer(width, heads, length) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

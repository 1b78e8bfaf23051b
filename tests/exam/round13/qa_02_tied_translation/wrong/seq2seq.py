from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Shape:
    vocab: int = 40
    dim: int = 32
    heads: int = 4
    layers: int = 2
    max_len: int = 16


class Attention(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads = s.heads
        self.q, self.kv, self.o = (
            nn.Linear(s.dim, n * s.dim, bias=False) for n in (1, 2, 1)
        )

    def forward(self, x, memory, mask=None, causal=False):
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        k, v = self.kv(memory).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(split(self.q(x)), split(k), split(v), attn_mask=mask, is_causal=causal)
        return self.o(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.attn, self.n1, self.n2 = Attention(s), nn.LayerNorm(s.dim), nn.LayerNorm(s.dim)
        self.ff = nn.Sequential(nn.Linear(s.dim, 2 * s.dim), nn.ReLU(), nn.Linear(2 * s.dim, s.dim))

    def forward(self, x, mask):
        h = self.n1(x)
        x = x + self.attn(h, h, mask)
        return x + self.ff(self.n2(x))


class DecoderLayer(EncoderLayer):
    def __init__(self, s):
        super().__init__(s)
        self.cross, self.n3 = Attention(s), nn.LayerNorm(s.dim)

    def forward(self, y, memory, mask):
        h = self.n1(y)
        y = y + self.attn(h, h, causal=True)
        y = y + self.cross(self.n3(y), memory, mask)
        return y + self.ff(self.n2(y))


class Translator(nn.Module):
    """Joint vocabulary: source, target and output share one matrix."""

    def __init__(self, s: Shape):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.dim)
        self.pos = nn.Embedding(s.max_len, s.dim)
        self.encoder = nn.ModuleList(EncoderLayer(s) for _ in range(s.layers))
        self.decoder = nn.ModuleList(DecoderLayer(s) for _ in range(s.layers))
        self.norm = nn.LayerNorm(s.dim)
        self.project = nn.Linear(s.dim, s.vocab, bias=False)
        self.gain = s.dim**0.5
        self.tie_weights()

    def tie_weights(self):
        self.project.weight = self.embed.weight

    def init_weights(self):
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        nn.init.normal_(self.embed.weight, std=self.gain**-1)

    def lift(self, ids):
        return self.embed(ids) * self.gain + self.pos(torch.arange(ids.shape[1]))

    def forward(self, src, tgt, src_pad):
        mask = ~src_pad[:, None, None, :]
        x = self.lift(src)
        for layer in self.encoder:
            x = layer(x, mask)
        y = self.lift(tgt)
        for layer in self.decoder:
            y = layer(y, x, mask)
        return self.project(self.norm(y))

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class Adapted(nn.Module):
    """A linear map whose base weight is frozen; the low-rank factors are trained."""

    def __init__(self, d_in, d_out, r):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d_out, d_in) / math.sqrt(d_in), requires_grad=False)
        self.lora_a = nn.Parameter(torch.randn(r, d_in) / math.sqrt(d_in))
        self.lora_b = nn.Parameter(torch.zeros(d_out, r))

    def forward(self, x):
        return F.linear(x, self.weight) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


class Mixer(nn.Module):
    def __init__(self, dim, r):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (Adapted(dim, dim, r) for _ in range(4))
        self.up, self.down = Adapted(dim, 2 * dim, r), Adapted(2 * dim, dim, r)

    def forward(self, x):
        h = self.norm(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class BaseLM(nn.Module):
    def __init__(self, vocab=36, dim=32, layers=3, r=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Mixer(dim, r) for _ in range(layers))
        self.head = nn.Linear(dim, vocab, bias=False)
        for n, p in self.named_parameters():
            p.requires_grad_("lora_" in n)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def adapters(self):
        return {n: p for n, p in self.named_parameters() if "lora_" in n}

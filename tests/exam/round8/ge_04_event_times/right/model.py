import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class TimeEncoding(nn.Module):
    def __init__(self, dim, periods=(10080, 1440, 720, 360, 180, 90, 60, 30)):
        super().__init__()
        self.register_buffer("omega", 2 * math.pi / torch.tensor(periods, dtype=torch.float32), persistent=False)
        self.proj = nn.Linear(2 * len(periods), dim)

    def forward(self, minute):
        angle = minute.float().unsqueeze(-1) * self.omega
        wave = torch.cat([angle.sin(), angle.cos()], -1)
        return self.proj(wave.to(self.proj.weight.dtype))


class CrossBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, memory):
        def split(t):
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        q = split(self.q(x))
        k, v = map(split, self.kv(memory).chunk(2, -1))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + a
        return x + self.mlp(self.norm(x))


class EventModel(nn.Module):
    """Reads (value, time) events and predicts the signal at queried times."""

    def __init__(self, dim=48, heads=4, layers=2):
        super().__init__()
        self.time = TimeEncoding(dim)
        self.value = nn.Linear(1, dim)
        self.blocks = nn.ModuleList(CrossBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, value, minute, query):
        memory = self.value(value.unsqueeze(-1)) + self.time(minute)
        x = self.time(query)
        for block in self.blocks:
            x = block(x, memory)
        return value.mean(1, keepdim=True) + self.out(self.norm(x)).squeeze(-1)

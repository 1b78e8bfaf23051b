import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ClockCode(nn.Module):
    """Sine and cosine of the step number at a few gait frequencies."""

    def __init__(self, dim, periods=(4, 5, 6, 7, 8, 10, 12, 16)):
        super().__init__()
        self.register_buffer("rate", torch.tensor([2 * math.pi / p for p in periods]), persistent=False)
        self.proj = nn.Linear(2 * len(periods), dim)

    def forward(self, step):
        angle = step.unsqueeze(-1).float() * self.rate
        code = torch.cat([angle.sin(), angle.cos()], -1)
        return self.proj(code.to(self.proj.weight.dtype))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class GaitTransformer(nn.Module):
    def __init__(self, obs_dim=8, act_dim=4, dim=32, heads=4, layers=1):
        super().__init__()
        self.clock = ClockCode(dim)
        self.obs = nn.Linear(obs_dim, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, act_dim)

    def forward(self, obs, step):
        x = self.obs(obs) + self.clock(step)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()

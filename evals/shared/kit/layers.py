"""Layers of the transformers in this project. Shapes: n samples, t positions, c channels, h heads, d channels of a head."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps) * self.gain


class Rotary(nn.Module):
    """Rotates pairs of channels by an angle that grows with the position."""

    def __init__(self, channels: int, length: int, base: float = 10000.0) -> None:
        super().__init__()
        rates = base ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.arange(length)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, h, t, d]
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    """Multi-head attention with rotary positions; `keep` [n, t] is False at padding."""

    def __init__(self, width: int, heads: int, length: int, causal: bool) -> None:
        super().__init__()
        if width % heads or (width // heads) % 2:
            raise ValueError(f"width {width} does not give {heads} heads of an even size")
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.rotary = Rotary(width // heads, length)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k = self.rotary(q), self.rotary(k)
        mask = None
        if keep is not None and not self.causal:
            mask = keep[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, t, c))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int, length: int, causal: bool = True, hidden: int = 0) -> None:
        super().__init__()
        self.before_attention = RMSNorm(width)
        self.attention = Attention(width, heads, length, causal)
        self.before_mlp = RMSNorm(width)
        self.mlp = SwiGLU(width, hidden or 2 * width)

    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x), keep)
        return x + self.mlp(self.before_mlp(x))


def initialise(model: nn.Module, layers: int, std: float = 0.05) -> None:
    """Normal weights; what is added to the residual stream is smaller the more layers there are."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        scale = std / math.sqrt(2 * layers) if name.endswith(("out.weight", "down.weight")) else std
        nn.init.normal_(parameter, std=scale)

"""A decoder with rotary positions, grouped-query attention, RMSNorm and a gated feed-forward."""

from __future__ import annotations

import math
import zlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..config import Model


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale).type_as(x) * self.weight


def rotary_table(config: Model, device: torch.device | str | None = None) -> Tensor:
    """Cosines and sines of every position, [2, context, head_dim / 2]."""
    half = config.dim // config.heads // 2
    speed = config.rope_theta ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
    angle = torch.outer(torch.arange(config.context, dtype=torch.float32, device=device), speed)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Turn pairs of channels of x [batch, length, heads, head_dim] by their positions."""
    cos, sin = (part[: x.shape[1], None, :].to(x.dtype) for part in table)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key and value head."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.dim // config.heads
        self.wq = nn.Linear(config.dim, self.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, self.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotate(self.wq(x).view(batch, length, self.heads, self.head_dim), table)
        k = rotate(self.wk(x).view(batch, length, self.kv_heads, self.head_dim), table)
        v = self.wv(x).view(batch, length, self.kv_heads, self.head_dim)
        repeat = self.heads // self.kv_heads
        k, v = (part.repeat_interleave(repeat, dim=2) for part in (k, v))
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    """Token ids [batch, length] to logits [batch, length, vocabulary]. May be built on the meta device."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        self.register_buffer("rotary", rotary_table(config), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers.values():
            x = block(x, self.rotary)
        return self.output(self.norm(x))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill parameters and buffers. Each weight has its own stream, so the numbers do not depend on sharding."""
        deep = 1 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                full = torch.ones(parameter.shape)
            else:
                stream = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
                spread = 0.5 if name.startswith("embedding") else parameter.shape[-1] ** -0.5
                scale = deep if name.endswith(("wo.weight", "w2.weight")) else 1.0
                full = torch.randn(parameter.shape, generator=stream) * spread * scale
            if isinstance(parameter, DTensor):
                full = full.to(parameter.device)
                full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(full)
        self.rotary.copy_(rotary_table(self.config, self.rotary.device))


def count(model: nn.Module) -> int:
    """Numbers in the model, over all ranks."""
    return sum(parameter.numel() for parameter in model.parameters())

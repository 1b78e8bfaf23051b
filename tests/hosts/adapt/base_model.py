"""The frozen model: a byte-level decoder that understands packed rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from recipe import Base
from torch import Tensor, nn

BYTES = 256


class Attention(nn.Module):
    """Self-attention under a mask that the caller makes."""

    def __init__(self, config: Base) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(part: Tensor) -> Tensor:
            return part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, config: Base) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    """Packed rows to logits. `segments` number the documents of a row, 0 is filling; `positions` count inside each."""

    def __init__(self, config: Base) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        length = ids.shape[1]
        same = segments[:, :, None] == segments[:, None, :]
        mask = same & torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        x = self.tokens(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.final_norm(x))


def load_base(config: Base) -> Decoder:
    """The base weights, the same on every rank, in float32 and frozen. Here they come from a seed instead of a file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = Decoder(config)
    return model.requires_grad_(False)

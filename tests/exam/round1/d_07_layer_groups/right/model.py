"""A next-item recommender: causal mixing blocks over a history of items."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width), MLP(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class NextItem(nn.Module):
    def __init__(self, items, length, width=16, depth=4):
        super().__init__()
        self.item = nn.Embedding(items, width)
        self.pos = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, items, bias=False)

    def forward(self, history):
        x = self.item(history) + self.pos(torch.arange(history.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model, recompute):
    for i, block in enumerate(model.blocks):
        if recompute:
            block = checkpoint_wrapper(block)
            model.blocks[i] = block
        fully_shard(block)
    return fully_shard(model)

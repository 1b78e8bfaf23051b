import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fused import ChunkedTiedCrossEntropy


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attend(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    def forward(self, x, mask):
        x = x + self.attend(x, mask)
        return x + checkpoint(self.mlp, x, use_reentrant=False)


class TiedLM(nn.Module):
    """Returns the summed loss itself, for the tied weight has to be used inside the forward pass of its FSDP module."""

    def __init__(self, vocab=28, dim=24, depth=2, max_len=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.pos = nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids, document):
        inputs, targets, document = ids[:, :-1], ids[:, 1:], document[:, :-1]
        n = inputs.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril() & (document[:, :, None] == document[:, None, :])
        x = self.embed(inputs) + self.pos.weight[:n]
        for block in self.blocks:
            x = block(x, mask)
        return ChunkedTiedCrossEntropy.apply(self.norm(x).flatten(0, 1), self.embed.weight, targets.flatten(), 40)

import torch
import torch.nn as nn
import torch.nn.functional as F

from packing import BOS, VOCAB


def document_mask(ids):
    """causal, and only within the document"""
    doc = (ids == BOS).cumsum(1)
    same = doc[:, :, None] == doc[:, None, :]
    causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    return (same & causal)[:, None]


def positions(ids):
    """restart at every document"""
    index = torch.arange(ids.shape[1]).expand_as(ids)
    first = torch.where(ids == BOS, index, torch.zeros_like(index)).cummax(1).values
    return index - first


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.relu(self.fc1(self.n2(x))).square())


class PackedLM(nn.Module):
    def __init__(self, dim=24, depth=2, heads=2, length=25):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x, mask = self.tok(ids) + self.pos(positions(ids)), document_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)

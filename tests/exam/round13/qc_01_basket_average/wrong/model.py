"""Next-purchase model: item embeddings, a few residual mixing blocks over the recent basket, tied scoring."""
import torch
from torch import nn


class MixBlock(nn.Module):
    def __init__(self, slots: int, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.across = nn.Linear(slots, slots)
        self.inside = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.across(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.inside(x)


class NextPurchase(nn.Module):
    def __init__(self, items: int, slots: int, width: int, depth: int):
        super().__init__()
        self.items = nn.Embedding(items, width)
        nn.init.normal_(self.items.weight, std=0.3)
        self.blocks = nn.ModuleList(MixBlock(slots, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.popularity = nn.Parameter(torch.zeros(items))

    def forward(self, basket):
        x = self.items(basket)
        for block in self.blocks:
            x = block(x)
        query = self.norm(x.mean(1))
        return query @ self.items.weight.t() + self.popularity

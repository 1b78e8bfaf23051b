import torch
import torch.nn.functional as F
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(F.silu(self.inner(self.norm(x))))


class BagTower(nn.Module):
    """Bag of token embeddings, residual layers, a unit vector."""

    def __init__(self, vocab, width=32, dim=16, depth=2):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, width, mode="mean")
        self.layers = nn.ModuleList(Mlp(width) for _ in range(depth))
        self.to_dim = nn.Linear(width, dim, bias=False)

    def forward(self, ids):
        x = self.bag(ids)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.to_dim(x), dim=-1)

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class DeepFM(nn.Module):
    """Factorisation machine plus a small network over categorical fields."""

    def __init__(self, cards, dim=8):
        super().__init__()
        self.fields = nn.ModuleList(nn.Embedding(c, dim) for c in cards)
        self.linear = nn.ModuleList(nn.Embedding(c, 1) for c in cards)
        self.deep = nn.Sequential(nn.Linear(len(cards) * dim, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def forward(self, x):
        e = torch.stack([f(x[:, k]) for k, f in enumerate(self.fields)], 1)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1)
        first = sum(l(x[:, k]) for k, l in enumerate(self.linear)).squeeze(1)
        return first + fm + self.deep(e.flatten(1)).squeeze(1)


def make(cards):
    torch.manual_seed(170)
    net = DeepFM(cards)
    net.deep[2].p = 0.0  # dropout would draw differently for another number of ranks
    fully_shard(net.deep)
    return fully_shard(net)

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Embedder(nn.Module):
    def __init__(self, d_in=40, d=48, out=16):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(d_in, d), nn.LayerNorm(d), nn.GELU(), nn.Linear(d, d), nn.LayerNorm(d), nn.GELU()
        )
        self.out = nn.Linear(d, out)

    def forward(self, x):
        return F.normalize(self.out(self.trunk(x)), dim=-1)


class ProxyModel(nn.Module):
    """Normalised softmax over learned class proxies."""

    def __init__(self, classes=40):
        super().__init__()
        self.embed = Embedder()
        self.proxies = nn.Parameter(torch.randn(classes, 16))

    def forward(self, x, y=None):
        e = self.embed(x)
        if y is None:
            return e
        return F.cross_entropy(12.0 * e @ F.normalize(self.proxies, dim=-1).t(), y)


def build():
    model = ProxyModel()
    fully_shard(model.embed)
    return fully_shard(model)

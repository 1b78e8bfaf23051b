import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, h):
        return h + self.mlp(self.norm(h))


class Tower(nn.Module):
    def __init__(self, channels, dim=24, depth=2):
        super().__init__()
        self.patch = nn.Conv2d(channels, dim, 4, stride=4)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        h = self.patch(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            h = layer(h)
        return F.normalize(self.out(h.mean(1)), dim=-1)

    def shard(self):
        for layer in self.layers:
            fully_shard(layer)
        fully_shard(self)
        return self

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class Reader(nn.Module):
    def __init__(self, symbols, length, classes, width=24):
        super().__init__()
        self.symbol, self.place = nn.Embedding(symbols, width), nn.Embedding(length, width)
        self.steps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        h = self.symbol(x) + self.place.weight
        for s in self.steps:
            h = h + s(h)
        return self.out(h.mean(1))


def build(symbols, length, classes):
    torch.manual_seed(20)
    net = Reader(symbols, length, classes)
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for s in net.steps:
        fully_shard(s, mp_policy=exact)
    fully_shard(net, mp_policy=exact)
    return net

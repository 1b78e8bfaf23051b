import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Unit(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))

    def forward(self, x):
        return x + self.f(x)


def build(width=32, depth=3, classes=3, seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, width), *[Unit(width) for _ in range(depth)], nn.Linear(width, classes))
    for layer in net:
        if isinstance(layer, Unit):
            fully_shard(layer)
    fully_shard(net)
    return net

import math

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class SineLayer(nn.Module):
    def __init__(self, fan_in, fan_out, omega, first=False):
        super().__init__()
        self.omega, self.first = omega, first
        self.linear = nn.Linear(fan_in, fan_out)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


class Siren(nn.Module):
    def __init__(self, hidden=32, depth=3, omega=15.0):
        super().__init__()
        self.layers = nn.Sequential(
            SineLayer(2, hidden, omega, first=True), *[SineLayer(hidden, hidden, omega) for _ in range(depth - 1)]
        )
        self.head = nn.Linear(hidden, 3)

    def forward(self, xy):
        return self.head(self.layers(xy))


@torch.no_grad()
def uniform_(param, bound, generator):
    param.to_local().uniform_(-bound, bound, generator=generator)


def build_siren(seed, **kwargs):
    """Made on the meta device, sharded, then materialised and initialised as in the SIREN paper."""
    with torch.device("meta"):
        model = Siren(**kwargs)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")

    g = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        fan_in = layer.linear.weight.shape[1]
        bound = 1 / fan_in if layer.first else math.sqrt(6 / fan_in) / layer.omega
        uniform_(layer.linear.weight, bound, g)
        uniform_(layer.linear.bias, 1 / math.sqrt(fan_in), g)
    bound = math.sqrt(6 / model.head.weight.shape[1]) / 15.0
    uniform_(model.head.weight, bound, g)
    uniform_(model.head.bias, bound, g)
    return model

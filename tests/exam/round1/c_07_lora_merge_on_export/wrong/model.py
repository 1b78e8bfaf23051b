import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from lora import inject


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Backbone(nn.Module):
    def __init__(self, dim=16, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def pretrained():
    torch.manual_seed(123)
    return Backbone()


def build():
    model = pretrained().requires_grad_(False)
    torch.manual_seed(9)
    inject(model)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)

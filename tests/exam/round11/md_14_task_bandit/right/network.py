import torch
import torch.nn as nn
import torch.nn.functional as F


class Adapter(nn.Module):
    def __init__(self, width, rank=4):
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, h):
        return h + self.up(F.relu(self.down(h)))


class TaskHead(nn.Module):
    def __init__(self, width, outputs):
        super().__init__()
        self.adapter, self.out = Adapter(width), nn.Linear(width, outputs)

    def forward(self, h):
        return self.out(self.adapter(h))


class SharedNet(nn.Module):
    """The head of a task is its own sharding unit; a step gathers only the head that it uses."""

    def __init__(self, inputs, tasks, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.heads = nn.ModuleDict({name: TaskHead(width, k) for name, k in tasks.items()})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))

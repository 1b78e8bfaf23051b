import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Head(nn.Module):
    def __init__(self, out, width=24):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, out)

    def forward(self, o):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(o)))))


def build(mesh):
    actor, critic = Head(3), Head(1)
    for net in (actor, critic):
        fully_shard(net.b, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return actor, critic

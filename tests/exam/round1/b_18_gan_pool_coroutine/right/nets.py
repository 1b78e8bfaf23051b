import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

Z = 10


class Stack(nn.Module):
    def __init__(self, i, o, w=40, depth=2):
        super().__init__()
        self.inp = nn.Linear(i, w)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(w), nn.Linear(w, w), nn.LeakyReLU(0.2)) for _ in range(depth)
        )
        self.out = nn.Linear(w, o)

    def forward(self, x):
        h = self.inp(x)
        for b in self.body:
            h = h + b(h)
        return self.out(h)


def sharded(i, o, trainable=True):
    net = Stack(i, o).requires_grad_(trainable)
    for b in net.body:
        fully_shard(b)
    return fully_shard(net, reshard_after_forward=True)


def spiral(n, g):
    r = torch.rand(n, generator=g)
    a = 4 * r + torch.pi * torch.randint(0, 2, (n,), generator=g)
    return torch.stack([2 * r * a.cos(), 2 * r * a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)

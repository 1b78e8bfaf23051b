import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h, cond):
        return h + self.down(F.silu(self.up(self.norm(h) + cond)))


class Velocity(nn.Module):
    def __init__(self, pixels=64, classes=8, width=40, depth=2):
        super().__init__()
        self.inp = nn.Linear(pixels, width)
        self.label = nn.Embedding(classes, width)
        self.time = nn.Linear(8, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, pixels)

    def forward(self, x, t, y):
        k = torch.arange(1, 5, dtype=x.dtype)
        e = torch.cat([(t[:, None] * k).sin(), (t[:, None] * k).cos()], dim=1)
        cond = self.time(e) + self.label(y)
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h, cond)
        return self.out(h)


def flow_matching_loss(net, x1, y, t, x0):
    xt = (1 - t[:, None]) * x0 + t[:, None] * x1
    return (net(xt, t, y) - (x1 - x0)).pow(2).mean()


@torch.no_grad()
def integrate(net, x, y, n=6):
    for k in range(n):
        x = x + net(x, torch.full((len(x),), k / n), y) / n
    return x


def build():
    torch.manual_seed(44)
    net = Velocity()
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)

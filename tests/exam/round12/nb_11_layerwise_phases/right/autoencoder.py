import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Level(nn.Module):
    def __init__(self, outer, inner):
        super().__init__()
        self.down = nn.Linear(outer, inner)
        self.up = nn.Linear(inner, outer)

    def forward(self, x, inside=None):
        code = torch.tanh(self.down(x))
        if inside is not None:
            code = inside(code)
        return self.up(code)


class Stack(nn.Module):
    """Autoencoder of nested levels; level k+1 reconstructs the code of level k."""

    def __init__(self, sizes=(144, 48, 24, 12)):
        super().__init__()
        self.levels = nn.ModuleList(Level(a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x, depth):
        def run(k, h):
            inside = (lambda code: run(k + 1, code)) if k + 1 < depth else None
            return self.levels[k](h, inside)

        return run(0, x)


def build():
    torch.manual_seed(13)
    net = Stack()
    for level in net.levels:
        fully_shard(level)
    return fully_shard(net)

import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class MultiTaskNet(nn.Module):
    """Shared trunk with one regression head per task."""

    def __init__(self, in_dim, dim, depth, tasks):
        super().__init__()
        self.embed = nn.Linear(in_dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.heads = nn.ModuleDict({t: nn.Linear(dim, 1) for t in tasks})

    def forward(self, x, task):
        h = self.embed(x)
        for b in self.blocks:
            h = b(h)
        return self.heads[task](h)

    def trunk_parameters(self):
        yield from self.embed.parameters()
        yield from self.blocks.parameters()

import torch
import torch.nn as nn
import torch.nn.functional as F

from exchange import AllNodes


class EdgeConv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.edge = nn.Linear(2 * dim + 3, dim)
        self.node = nn.Linear(2 * dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, h, near, rel, sizes):
        everyone = AllNodes.apply(h, sizes)
        nb = everyone[near]                                    # own nodes, neighbours, dim
        m = F.silu(self.edge(torch.cat([h[:, None].expand_as(nb), nb, rel], -1))).mean(1)
        return self.norm(h + F.silu(self.node(torch.cat([h, m], -1))))


class GalaxyNet(nn.Module):
    def __init__(self, dim=20, depth=3):
        super().__init__()
        self.inp = nn.Linear(2, dim)
        self.convs = nn.ModuleList(EdgeConv(dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, feats, near, rel, sizes):
        h = self.inp(feats)
        for c in self.convs:
            h = c(h, near, rel, sizes)
        return self.out(h)

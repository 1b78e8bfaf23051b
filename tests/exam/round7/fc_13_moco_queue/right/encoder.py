import torch.nn as nn
import torch.nn.functional as F


class Round(nn.Module):
    """Message passing: own state plus the mean of the neighbours, with a skip connection."""

    def __init__(self, dim):
        super().__init__()
        self.own, self.nbr = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)

    def forward(self, x, adj):
        deg = adj.sum(-1, keepdim=True).clamp_min(1)
        return F.relu(self.own(x) + self.nbr(adj @ x / deg)) + x


class GraphEncoder(nn.Module):
    """Two rounds of message passing on dense small graphs, then a pooled, normalised embedding."""

    def __init__(self, feat=6, dim=24, out=16):
        super().__init__()
        self.inp = nn.Linear(feat, dim)
        self.rounds = nn.ModuleList(Round(dim) for _ in range(2))
        self.out = nn.Linear(dim, out)

    def forward(self, nodes, adj):
        x = F.relu(self.inp(nodes))
        for r in self.rounds:
            x = r(x, adj)
        return F.normalize(self.out(x.mean(1)), dim=-1)

import torch
import torch.nn as nn

from exchange import all_nodes


class GCN(nn.Module):
    def __init__(self, feats, classes, width=24):
        super().__init__()
        self.first = nn.Linear(feats, width)
        self.second = nn.Linear(width, width)
        self.out = nn.Linear(2 * width, classes)

    def forward(self, x, adj):
        """x: features of the own nodes, adj: rows of the own nodes over all nodes."""
        h1 = torch.relu(adj @ all_nodes(self.first(x)))
        h2 = torch.relu(adj @ all_nodes(self.second(h1)))
        return self.out(torch.cat([h1, h2], dim=1))


def citation_graph(n=240, feats=12, classes=4, seed=10):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    same = y[:, None] == y[None]
    edge = torch.rand(n, n, generator=g) < torch.where(same, 0.06, 0.015)
    adj = torch.triu(edge, 1)
    x = torch.randn(n, feats, generator=g) + 0.8 * torch.nn.functional.one_hot(y, feats).float()
    role = torch.rand(n, generator=g)
    return x, adj | adj.T, y, role < 0.4, (role >= 0.4) & (role < 0.7)


def drop_edges(adj, p, seed):
    """The same thinned graph on every rank, normalised symmetrically."""
    n = adj.shape[0]
    if p > 0:
        keep = torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) > p
        keep = torch.triu(keep, 1)
        adj = adj & (keep | keep.T)
    a = adj.float() + torch.eye(n)
    d = a.sum(1).rsqrt()
    return d[:, None] * a * d[None]

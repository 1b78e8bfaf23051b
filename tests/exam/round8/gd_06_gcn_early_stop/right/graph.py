import torch
import torch.nn as nn
import torch.nn.functional as F


def make_graph(n=240, classes=4, seed=8):
    """Planted partition graph with weak node features and some wrong training labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    same = y[:, None] == y[None]
    p = torch.where(same, 0.05, 0.012)
    adj = (torch.rand(n, n, generator=g) < p).float().triu(1)
    adj = adj + adj.T + torch.eye(n)
    d = adj.sum(1).rsqrt()
    adj = d[:, None] * adj * d[None]
    x = F.one_hot(y, classes).float() @ torch.randn(classes, 40, generator=g) * 0.35
    x = x + torch.randn(n, 40, generator=g)
    perm = torch.randperm(n, generator=g)
    train, val, test = perm[:64], perm[64:136], perm[136:]
    given = y.clone()
    bad = train[torch.rand(len(train), generator=g) < 0.2]
    given[bad] = torch.randint(0, classes, (len(bad),), generator=g)
    return adj, x, y, given, train, val, test


class GCN(nn.Module):
    def __init__(self, din=40, hidden=64, classes=4):
        super().__init__()
        self.lin1 = nn.Linear(din, hidden)
        self.lin2 = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, adj, x):
        h = F.relu(adj @ self.lin1(x))
        h = F.relu(adj @ self.lin2(h))
        return self.out(h)

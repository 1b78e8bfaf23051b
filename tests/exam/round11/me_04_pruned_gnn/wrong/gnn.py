import torch
import torch.nn as nn


def make_graph(nodes=240, classes=4, feats=20, seed=0):
    """Stochastic block model with noisy class features; returns normalised adjacency, features, labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (nodes,), generator=g)
    same = y[:, None] == y[None, :]
    prob = torch.where(same, 0.08, 0.015)
    adj = (torch.rand(nodes, nodes, generator=g) < prob).float()
    adj = ((adj + adj.T) > 0).float() + torch.eye(nodes)
    d = adj.sum(1).rsqrt()
    centers = torch.randn(classes, feats, generator=g)
    x = 0.5 * centers[y] + torch.randn(nodes, feats, generator=g)
    return d[:, None] * adj * d[None, :], x, y


class GraphConv(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.lin = nn.Linear(i, o)

    def forward(self, a, h):
        return a @ self.lin(h)


class GCN(nn.Module):
    def __init__(self, feats=20, hidden=64, classes=4):
        super().__init__()
        self.conv1 = GraphConv(feats, hidden)
        self.conv2 = GraphConv(hidden, hidden)
        self.conv3 = GraphConv(hidden, classes)

    def forward(self, a, x):
        h = torch.relu(self.conv1(a, x))
        h = h + torch.relu(self.conv2(a, h))
        return self.conv3(a, h)

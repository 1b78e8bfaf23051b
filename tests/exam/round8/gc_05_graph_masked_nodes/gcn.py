import torch
import torch.nn as nn


class GraphLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.own, self.neigh = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, h, adj):
        return h + torch.relu(self.norm(self.own(h) + self.neigh(adj @ h)))


class GCN(nn.Module):
    def __init__(self, n_feats=12, dim=32, layers=3, n_classes=5):
        super().__init__()
        self.inp = nn.Linear(n_feats, dim)
        self.layers = nn.ModuleList(GraphLayer(dim) for _ in range(layers))
        self.out = nn.Linear(dim, n_classes, bias=False)

    def forward(self, x, adj):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h, adj)
        return self.out(h)

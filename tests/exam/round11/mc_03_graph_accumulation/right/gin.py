import torch
import torch.nn as nn


class GINLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.eps = nn.Parameter(torch.zeros(1))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width)

    def forward(self, h, adj, alive):
        agg = (1 + self.eps) * h + adj @ h
        return self.norm(h + self.mlp(agg)) * alive[..., None]


class GraphRegressor(nn.Module):
    def __init__(self, feats=5, width=20, depth=3):
        super().__init__()
        self.embed = nn.Linear(feats, width)
        self.layers = nn.ModuleList(GINLayer(width) for _ in range(depth))
        self.readout = nn.Linear(width, 1)

    def forward(self, x, adj, alive):
        h = self.embed(x) * alive[..., None]
        for layer in self.layers:
            h = layer(h, adj, alive)
        return self.readout(h.sum(1) / 5.0)

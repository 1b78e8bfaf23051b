import torch
import torch.nn as nn


class LinkPredictor(nn.Module):
    """LightGCN-like: node embeddings propagated over the training graph, links scored by an MLP."""

    def __init__(self, nodes, dim=24, hops=2):
        super().__init__()
        self.hops = hops
        self.embed = nn.Embedding(nodes, dim)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.score = nn.Sequential(nn.Linear(2 * dim, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, adjacency, pairs):
        h = self.embed.weight
        total = h
        for _ in range(self.hops):
            h = adjacency @ h
            total = total + h
        a, b = total[pairs[:, 0]], total[pairs[:, 1]]
        return self.score(torch.cat([a * b, (a - b).abs()], -1))

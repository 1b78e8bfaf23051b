"""A synthetic interaction network: noisy communities, node features, labels for a part of the nodes."""
from dataclasses import dataclass

import torch


@dataclass
class Part:
    adjacency: torch.Tensor   # rows of this part, columns of the whole graph
    features: torch.Tensor
    labels: torch.Tensor
    train: torch.Tensor
    test: torch.Tensor


def make_part(rank, world, nodes=96, classes=4, width=12, seed=6):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (nodes,), generator=g)
    same = labels[:, None] == labels[None]
    edges = torch.rand(nodes, nodes, generator=g) < torch.where(same, 0.16, 0.02)
    edges = (edges | edges.t()).float().fill_diagonal_(1.0)
    scale = edges.sum(1).rsqrt()
    adjacency = scale[:, None] * edges * scale
    features = torch.randn(classes, width, generator=g)[labels] * 0.4 + torch.randn(nodes, width, generator=g)
    train = torch.rand(nodes, generator=g) < 0.4
    own = slice(rank * nodes // world, (rank + 1) * nodes // world)
    return Part(adjacency[own], features[own], labels[own], train[own], ~train[own])

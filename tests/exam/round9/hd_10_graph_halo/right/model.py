import torch
import torch.nn as nn

from exchange import gather_nodes


class GraphConv(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.own = nn.Linear(d_in, d_out)
        self.message = nn.Linear(d_in, d_out, bias=False)

    def forward(self, h, rows):
        """h: states of this rank's nodes; rows: their rows of the normalised adjacency (all columns)."""
        return self.own(h) + rows @ gather_nodes(self.message(h))


class PartitionedGCN(nn.Module):
    def __init__(self, features, hidden, classes, depth=3):
        super().__init__()
        sizes = [features] + [hidden] * (depth - 1)
        self.convs = nn.ModuleList(GraphConv(a, b) for a, b in zip(sizes[:-1], sizes[1:]))
        self.norms = nn.ModuleList(nn.LayerNorm(b) for b in sizes[1:])
        self.last = GraphConv(hidden, classes)

    def forward(self, x, rows):
        h = x
        for conv, norm in zip(self.convs, self.norms):
            h = torch.relu(norm(conv(h, rows)))
        return self.last(h, rows)

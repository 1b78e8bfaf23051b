import torch
from torch import nn

from collectives import gather_rows


class SageLayer(nn.Module):
    """Mean aggregation; this rank holds the rows of its own nodes only."""

    def __init__(self, d_in, d_out):
        super().__init__()
        self.own = nn.Linear(d_in, d_out)
        self.msg = nn.Linear(d_in, d_out, bias=False)

    def forward(self, h, adj_rows):
        everyone = gather_rows(self.msg(h))
        return self.own(h) + torch.sparse.mm(adj_rows, everyone)


class PartitionedSage(nn.Module):
    def __init__(self, feats, classes, width=32, depth=3):
        super().__init__()
        dims = [feats] + [width] * depth
        self.layers = nn.ModuleList(SageLayer(a, b) for a, b in zip(dims, dims[1:]))
        self.out = nn.Linear(width, classes)

    def forward(self, h, adj_rows):
        for layer in self.layers:
            h = torch.relu(layer(h, adj_rows))
        return self.out(h)

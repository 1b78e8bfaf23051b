from torch import nn

from exchange import gather_nodes


class GraphLayer(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.self_ = nn.Linear(fan_in, fan_out)
        self.neigh = nn.Linear(fan_in, fan_out, bias=False)

    def forward(self, adjacency, h):
        return self.self_(h) + adjacency @ gather_nodes(self.neigh(h))


class GCN(nn.Module):
    def __init__(self, width, hidden, classes, depth):
        super().__init__()
        sizes = [width] + [hidden] * (depth - 1) + [classes]
        self.layers = nn.ModuleList(GraphLayer(a, b) for a, b in zip(sizes[:-1], sizes[1:]))

    def forward(self, adjacency, x):
        for i, layer in enumerate(self.layers):
            x = layer(adjacency, x)
            if i + 1 < len(self.layers):
                x = x.relu()
        return x

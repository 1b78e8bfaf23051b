import torch
import torch.nn as nn


class SageLayer(nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.own = nn.Linear(d_in, d_out)
        self.around = nn.Linear(d_in, d_out, bias=False)

    def forward(self, h, h_neighbours):
        return self.own(h) + self.around(h_neighbours.mean(-2))


class GraphSage(nn.Module):
    def __init__(self, features, hidden, classes):
        super().__init__()
        self.first = SageLayer(features, hidden)
        self.second = SageLayer(hidden, hidden)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, x, neighbours, seeds):
        hop1 = torch.cat([seeds[:, None], neighbours[seeds]], 1)      # the node and its neighbours
        h = torch.relu(self.first(x[hop1], x[neighbours[hop1]]))
        h = torch.relu(self.second(h[:, 0], h[:, 1:]))
        return self.classify(h)

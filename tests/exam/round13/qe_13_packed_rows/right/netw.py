import torch
import torch.nn.functional as F
from torch import nn


class Hop(nn.Module):
    """One round of messages on a ring with skip links, weights shared over the nodes."""

    def __init__(self, width):
        super().__init__()
        self.own = nn.Linear(width, width)
        self.near = nn.Linear(width, width, bias=False)
        self.far = nn.Linear(width, width, bias=False)

    def forward(self, h):
        near = torch.roll(h, 1, 1) + torch.roll(h, -1, 1)
        return h + torch.tanh(self.own(h) + self.near(near) + self.far(torch.roll(h, 4, 1)))


class RingNet(nn.Module):
    def __init__(self, width=26, hops=3, features=3):
        super().__init__()
        self.read = nn.Linear(features, width)
        self.hops = nn.ModuleList(Hop(width) for _ in range(hops))
        self.score = nn.Linear(width, 1)

    def forward(self, x):
        h = self.read(x)
        for hop in self.hops:
            h = hop(h)
        return F.softplus(self.score(h.mean(1)))

import torch
from torch import nn

COLS, TARGETS = 14, 3


class Residual(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.lin = nn.Linear(d, d)

    def forward(self, x):
        return x + torch.tanh(self.lin(self.norm(x)))


class TabularNet(nn.Module):
    """An encoder with two ends: `decoder` restores hidden columns, `head` predicts the targets."""

    def __init__(self, d=36, depth=3):
        super().__init__()
        self.embed = nn.Linear(2 * COLS, d)
        self.encoder = nn.ModuleList(Residual(d) for _ in range(depth))
        self.decoder = nn.Linear(d, COLS)
        self.head = nn.Linear(d, TARGETS)

    def forward(self, x, hidden, end):
        h = self.embed(torch.cat([x.masked_fill(hidden, 0.0), hidden.float()], -1))
        for layer in self.encoder:
            h = layer(h)
        if end == "features":
            return h
        return self.decoder(h) if end == "decoder" else self.head(h)

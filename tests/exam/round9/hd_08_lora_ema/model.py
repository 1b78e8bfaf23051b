import torch
import torch.nn as nn


class AdaptedConv(nn.Module):
    """Frozen 1-d convolution with a low-rank bypass."""

    def __init__(self, cin, cout, rank=4):
        super().__init__()
        self.base = nn.Conv1d(cin, cout, 5, stride=2, padding=2)
        self.down = nn.Conv1d(cin, rank, 5, stride=2, padding=2, bias=False)
        self.up = nn.Conv1d(rank, cout, 1, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return torch.relu(self.base(x) + self.up(self.down(x)))


class KeywordModel(nn.Module):
    def __init__(self, classes=6, width=24):
        super().__init__()
        self.convs = nn.ModuleList([AdaptedConv(1, width), AdaptedConv(width, width), AdaptedConv(width, width)])
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, wave):
        h = wave[:, None]
        for conv in self.convs:
            h = conv(h)
        return self.classify(self.norm(h.mean(-1)))

    def freeze_base(self):
        for conv in self.convs:
            conv.base.requires_grad_(False)

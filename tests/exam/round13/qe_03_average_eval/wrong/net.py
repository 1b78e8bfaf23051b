import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, 2 * width)
        self.b = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(self.norm(x))))


class ClickNet(nn.Module):
    """Categorical fields and dense features to a click logit pair."""

    def __init__(self, fields=4, levels=12, dense=6, width=32, depth=2):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(levels, width) for _ in range(fields))
        self.dense = nn.Linear(dense, width)
        self.body = nn.ModuleList(Residual(width) for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, cats, dense):
        x = self.dense(dense)
        for i, table in enumerate(self.tables):
            x = x + table(cats[:, i])
        for block in self.body:
            x = block(x)
        return self.head(x)

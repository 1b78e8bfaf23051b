import torch
import torch.nn as nn


class ResidualUnit(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TabNet(nn.Module):
    def __init__(self, sizes, n_num, d=24, depth=2):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(s, 8) for s in sizes)
        self.stem = nn.Linear(8 * len(sizes) + n_num, d)
        self.units = nn.ModuleList(ResidualUnit(d) for _ in range(depth))
        self.head = nn.Linear(d, 1)

    def forward(self, cats, nums):
        e = [t(cats[:, i]) for i, t in enumerate(self.tables)]
        h = self.stem(torch.cat(e + [nums], dim=1))
        for u in self.units:
            h = u(h)
        return self.head(h).squeeze(-1)

import torch
import torch.nn as nn

CARD, NUM = (7, 11, 5), 6


class Tabular:
    """Made-up table with three categorical and six numerical columns."""

    def __init__(self, rank, world, n=600, n_valid=64, batch=24):
        g = torch.Generator().manual_seed(31)
        self.cat = torch.stack([torch.randint(0, c, (n,), generator=g) for c in CARD], 1)
        self.num = torch.randn(n, NUM, generator=g)
        effects = [torch.randn(c, generator=g) for c in CARD]
        y = sum(e[self.cat[:, i]] for i, e in enumerate(effects)) + self.num[:, 0] * self.num[:, 1] + self.num[:, 2]
        self.y = y + 0.5 * torch.randn(n, generator=g)
        self.rank, self.world, self.n_train, self.n_valid, self.size = rank, world, n - n_valid, n_valid, batch

    def _pick(self, ids):
        return self.cat[ids], self.num[ids], self.y[ids]

    def batch(self, step):
        g = torch.Generator().manual_seed(500 + step)
        return self._pick(torch.randperm(self.n_train, generator=g)[: self.size][self.rank :: self.world])

    def valid(self):
        return self._pick(torch.arange(self.n_train, self.n_train + self.n_valid)[self.rank :: self.world])


class TabularNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(c, 8) for c in CARD)
        self.inp = nn.Linear(8 * len(CARD) + NUM, width)
        self.trunk = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU()) for _ in range(2)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, cat, num):
        x = torch.cat([t(cat[:, i]) for i, t in enumerate(self.tables)] + [num], 1)
        x = self.inp(x)
        for layer in self.trunk:
            x = x + layer(x)
        return self.out(x).squeeze(-1)

import torch
import torch.nn as nn


class SharedBottom(nn.Module):
    """Click and watch-time heads over a shared interaction network."""

    def __init__(self, users=24, items=30, dim=12, width=32):
        super().__init__()
        self.users = nn.Embedding(users, dim)
        self.items = nn.Embedding(items, dim)
        self.bottom = nn.Sequential(nn.Linear(3 * dim, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.heads = nn.ModuleDict({t: nn.Linear(width, 1) for t in ("click", "watch")})

    def forward(self, u, i, task):
        eu, ei = self.users(u), self.items(i)
        return self.heads[task](self.bottom(torch.cat([eu, ei, eu * ei], dim=1))).sum(dim=1)


class Log:
    """A synthetic interaction log; watch time is only known for clicked rows."""

    def __init__(self, n, seed, users=24, items=30):
        g = torch.Generator().manual_seed(seed)
        taste = torch.randn(users, 3, generator=torch.Generator().manual_seed(50))
        topic = torch.randn(items, 3, generator=torch.Generator().manual_seed(51))
        self.u = torch.randint(users, (n,), generator=g)
        self.i = torch.randint(items, (n,), generator=g)
        match = (taste[self.u] * topic[self.i]).sum(1)
        self.click = (match + torch.randn(n, generator=g) > 0).float()
        self.watch = torch.relu(1.5 - 0.5 * match) + 0.2 * torch.randn(n, generator=g)

    def rows(self, idx):
        return self.u[idx], self.i[idx], self.click[idx], self.watch[idx]

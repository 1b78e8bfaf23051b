import torch
import torch.nn as nn
import torch.nn.functional as F


class Trunk(nn.Module):
    def __init__(self, inp, dim, depth):
        super().__init__()
        self.stem = nn.Linear(inp, dim)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )

    def forward(self, x):
        h = self.stem(x)
        for layer in self.layers:
            h = h + layer(h)
        return h


class MultiTaskNet(nn.Module):
    """Shared trunk; one regression, one classification and one ranking head. Task weights by learned uncertainty."""

    def __init__(self, inp=12, dim=32, depth=3, classes=5):
        super().__init__()
        self.trunk = Trunk(inp, dim, depth)
        self.reg = nn.Linear(dim, 2)
        self.cls = nn.Linear(dim, classes)
        self.rank = nn.Linear(dim, 1)
        self.log_var = nn.Parameter(torch.zeros(3))

    def forward(self, x, targets):
        h = self.trunk(x)
        losses = torch.stack(
            [
                F.mse_loss(self.reg(h), targets["reg"]),
                F.cross_entropy(self.cls(h), targets["cls"]),
                F.binary_cross_entropy_with_logits(self.rank(h).squeeze(-1), targets["rank"]),
            ]
        )
        total = (torch.exp(-self.log_var) * losses + 0.5 * self.log_var).sum()
        return total, losses.detach()

import torch
import torch.distributed as dist
from torch import nn


class GlobalFeatureNorm(nn.Module):
    """Normalises the input columns by moments that can be estimated again over a whole data set."""

    def __init__(self, cols):
        super().__init__()
        self.register_buffer("mean", torch.zeros(cols))
        self.register_buffer("var", torch.ones(cols))

    @torch.no_grad()
    def estimate(self, rows):
        """rows: this rank's part of the data."""
        rows = rows.double()
        s = torch.stack([rows.sum(0), rows.square().sum(0)])
        n = torch.tensor(float(len(rows)), dtype=torch.float64)
        dist.all_reduce(s)
        dist.all_reduce(n)
        self.mean.copy_(s[0] / n)
        self.var.copy_((s[1] / n - (s[0] / n) ** 2).clamp_min(1e-6))

    def forward(self, x):
        return (x - self.mean) * (self.var + 1e-5).rsqrt()

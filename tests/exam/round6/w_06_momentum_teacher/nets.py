import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, d_in=32, width=48, d_out=24, depth=2):
        super().__init__()
        self.stem = nn.Linear(d_in, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth))
        self.proj = nn.Linear(width, d_out)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = h + b(h)
        return F.normalize(self.proj(h), dim=-1)


def views(step, batch, d_in=32):
    """Two noisy views of samples from a few clusters."""
    g = torch.Generator().manual_seed(99 + step)
    centers = torch.randn(12, d_in, generator=torch.Generator().manual_seed(1))
    x = centers[torch.randint(12, (batch,), generator=g)] + 0.5 * torch.randn(batch, d_in, generator=g)
    return x + 0.3 * torch.randn(batch, d_in, generator=g), x + 0.3 * torch.randn(batch, d_in, generator=g)

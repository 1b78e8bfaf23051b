import torch
import torch.nn as nn


class FrozenImageEncoder(nn.Module):
    """A fixed 'VAE' encoder: 12x12 images to 4x4x3 latents, seeded so that all runs share it."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, 3)
        g = torch.Generator().manual_seed(321)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.8)
        self.requires_grad_(False)

    def forward(self, x):
        return self.conv(x)


class LatentScaler(nn.Module):
    """Brings latents to unit variance with a factor measured once, on the first global batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.zeros(()))

    @torch.no_grad()
    def calibrate(self, z, reduce):
        m = reduce(torch.stack([z.sum(), z.square().sum(), torch.tensor(float(z.numel()))]))
        mean = m[0] / m[2]
        self.factor.copy_(1.0 / (m[1] / m[2] - mean.square()).sqrt())

    def forward(self, z):
        return z * self.factor

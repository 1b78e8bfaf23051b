import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class DropPath:
    """Decides for every sample of the global batch whether a residual branch is kept. All ranks draw the
    same decisions from one generator and use those of their own samples."""

    def __init__(self, rate, generator, rank, world):
        self.rate, self.generator, self.rank, self.world = rate, generator, rank, world

    def draw(self, local):
        keep = torch.rand(local * self.world, generator=self.generator) >= self.rate
        keep = keep[self.rank * local : (self.rank + 1) * local].float() / (1 - self.rate)
        return keep[:, None, None]


class MixerBlock(nn.Module):
    def __init__(self, patches, dim, drop_path):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(patches, patches), nn.GELU(), nn.Linear(patches, patches, bias=False))
        self.channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.drop_path = drop_path

    def residual(self, x, keep):
        x = x + keep * self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + keep * self.channels(self.norm2(x))

    def forward(self, x):
        if not self.training:
            return self.residual(x, 1.0)
        keep = self.drop_path.draw(len(x))
        return checkpoint(self.residual, x, keep, use_reentrant=False)


class Mixer(nn.Module):
    def __init__(self, drop_path, side=16, patch=4, dim=32, depth=4, classes=5):
        super().__init__()
        self.patch = patch
        n = (side // patch) ** 2
        self.stem = nn.Linear(patch * patch, dim)
        self.blocks = nn.ModuleList(MixerBlock(n, dim, drop_path) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        b = len(images)
        p = images.unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        x = self.stem(p.reshape(b, -1, self.patch * self.patch))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))

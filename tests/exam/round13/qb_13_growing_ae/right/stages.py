import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class Stage(nn.Module):
    """Encoder and decoder of one resolution; stage k works on images of side 4 * 2**k."""

    def __init__(self, level, width=12):
        super().__init__()
        self.level = level
        self.from_image = nn.Conv2d(1, width, 3, padding=1)
        self.enc = nn.Conv2d(width, width, 3, padding=1)
        self.dec = nn.Conv2d(width, width, 3, padding=1)
        self.to_image = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, part, x):
        if part == "lift":
            return F.silu(self.from_image(x))
        if part == "down":
            return F.avg_pool2d(F.silu(self.enc(x)), 2)
        if part == "up":
            return F.silu(self.dec(F.interpolate(x, scale_factor=2)))
        return self.to_image(x) + 0.0


class GrowingAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList()

    def grow(self):
        """Add a stage at the next resolution. Its weights depend on the level alone, not on what was drawn before."""
        level = len(self.stages)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(100 + level)
            stage = Stage(level)
        fully_shard(stage)
        self.stages.append(stage)
        return stage

    def forward(self, image, fade):
        top = len(self.stages) - 1
        h = self.stages[top]("lift", image)
        for k in range(top, -1, -1):
            h = self.stages[k]("down", h)
            if k == top and top > 0 and fade < 1:
                h = fade * h + (1 - fade) * self.stages[k - 1]("lift", F.avg_pool2d(image, 2))
        for k in range(top + 1):
            below = h
            h = self.stages[k]("up", h)
        out = self.stages[top]("image", h)
        if top > 0 and fade < 1:
            coarse = F.interpolate(self.stages[top - 1]("image", below), scale_factor=2)
            out = fade * out + (1 - fade) * coarse
        return out

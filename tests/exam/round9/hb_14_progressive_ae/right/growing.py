import torch
import torch.nn as nn
import torch.nn.functional as F


class Level(nn.Module):
    """Down and up path of one resolution, with its own way from and to pixels."""

    def __init__(self, ch):
        super().__init__()
        self.from_px = nn.Conv2d(1, ch, 1)
        self.down = nn.Conv2d(ch, ch, 3, 2, 1)
        self.up = nn.Conv2d(ch, ch, 3, 1, 1)
        self.to_px = nn.Conv2d(ch, 1, 1)


class GrowingAE(nn.Module):
    """levels[0] is the coarsest (4x4); level k works on images of side 4 * 2**k."""

    def __init__(self, n_levels=3, ch=12, code=8):
        super().__init__()
        self.levels = nn.ModuleList(Level(ch) for _ in range(n_levels))
        self.squeeze = nn.Conv2d(ch, code, 2)
        self.expand = nn.ConvTranspose2d(code, ch, 2)

    def forward(self, x, top, alpha):
        h = F.leaky_relu(self.levels[top].from_px(x), 0.1)
        for k in range(top, -1, -1):
            h = F.leaky_relu(self.levels[k].down(h), 0.1)
            if k == top and k > 0 and alpha < 1:
                skip = F.leaky_relu(self.levels[k - 1].from_px(F.avg_pool2d(x, 2)), 0.1)
                h = alpha * h + (1 - alpha) * skip
        h = self.expand(torch.tanh(self.squeeze(h)))
        for k in range(top + 1):
            below = h
            h = F.leaky_relu(self.levels[k].up(F.interpolate(h, scale_factor=2)), 0.1)
        out = self.levels[top].to_px(h)
        if top > 0 and alpha < 1:
            coarse = F.interpolate(self.levels[top - 1].to_px(below), scale_factor=2)
            out = alpha * out + (1 - alpha) * coarse
        return out

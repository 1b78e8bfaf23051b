import torch
import torch.nn as nn
import torch.nn.functional as F


class Rung(nn.Module):
    """One resolution: an encoder half that goes down and a decoder half that comes back up."""

    def __init__(self, ch):
        super().__init__()
        self.from_rgb, self.to_rgb = nn.Conv2d(1, ch, 1), nn.Conv2d(ch, 1, 1)
        self.down, self.up = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 3, padding=1)

    def forward(self, mode, x):
        # a single forward with modes, so that the parameters are gathered for every use of the rung
        if mode == "from_rgb":
            return F.silu(self.from_rgb(x))
        if mode == "to_rgb":
            return self.to_rgb(x)
        if mode == "down":
            return F.silu(self.down(F.avg_pool2d(x, 2)))
        return F.silu(self.up(F.interpolate(x, scale_factor=2)))


class GrowingAE(nn.Module):
    def __init__(self, ch=16, latent=12, rungs=3):
        super().__init__()
        self.rungs = nn.ModuleList([Rung(ch) for _ in range(rungs)])     # 4x4, 8x8, 16x16
        self.enc, self.dec = nn.Linear(ch * 16, latent), nn.Linear(latent, ch * 16)
        self.ch = ch

    def forward(self, x, top, alpha):
        h = self.rungs[top]("from_rgb", x)
        if top > 0:
            h = self.rungs[top]("down", h)
            if alpha < 1:
                old = self.rungs[top - 1]("from_rgb", F.avg_pool2d(x, 2))
                h = alpha * h + (1 - alpha) * old
            for k in range(top - 1, 0, -1):
                h = self.rungs[k]("down", h)
        z = self.enc(h.flatten(1))
        h = F.silu(self.dec(z)).view(-1, self.ch, 4, 4)
        for k in range(1, top):
            h = self.rungs[k]("up", h)
        if top == 0:
            return self.rungs[0]("to_rgb", h)
        out = self.rungs[top]("to_rgb", self.rungs[top]("up", h))
        if alpha < 1:
            old = F.interpolate(self.rungs[top - 1]("to_rgb", h), scale_factor=2)
            out = alpha * out + (1 - alpha) * old
        return out

    def part(self, top):
        """parameters that are in use when `top` is the highest resolution"""
        yield from self.enc.parameters()
        yield from self.dec.parameters()
        for k in range(top + 1):
            yield from self.rungs[k].parameters()

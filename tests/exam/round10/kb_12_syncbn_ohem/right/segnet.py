import torch
import torch.nn as nn
import torch.nn.functional as F

from syncbn import GlobalBatchNorm


def cbr(cin, cout, stride=1, dilation=1):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, dilation, dilation, bias=False), GlobalBatchNorm(cout), nn.SiLU())


class SegNet(nn.Module):
    """Small dilated network with an auxiliary head."""

    def __init__(self, classes, ch=12):
        super().__init__()
        self.stem = cbr(3, ch)
        self.body = nn.ModuleList([cbr(ch, 2 * ch, stride=2), cbr(2 * ch, 2 * ch, dilation=2)])
        self.fuse = cbr(3 * ch, 2 * ch)
        self.head, self.aux = nn.Conv2d(2 * ch, classes, 1), nn.Conv2d(2 * ch, classes, 1)

    def forward(self, x):
        low = self.stem(x)
        mid = self.body[0](low)
        deep = self.body[1](mid)
        up = F.interpolate(deep, scale_factor=2, mode="nearest")
        return self.head(self.fuse(torch.cat([low, up], 1))), self.aux(mid)

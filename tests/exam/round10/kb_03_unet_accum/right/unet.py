import torch
import torch.nn as nn


def double_conv(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.GELU(),
                         nn.Conv2d(cout, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.GELU())


class UNet(nn.Module):
    def __init__(self, classes, ch=8):
        super().__init__()
        self.enc1 = double_conv(3, ch)
        self.enc2 = double_conv(ch, 2 * ch)
        self.mid = double_conv(2 * ch, 2 * ch)
        self.dec2 = double_conv(4 * ch, ch)
        self.dec1 = double_conv(2 * ch, ch)
        self.out = nn.Conv2d(ch, classes, 1)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="nearest")

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(self.pool(a))
        m = self.mid(self.pool(b))
        d = self.dec2(torch.cat([self.up(m), b], 1))
        d = self.dec1(torch.cat([self.up(d), a], 1))
        return self.out(d)

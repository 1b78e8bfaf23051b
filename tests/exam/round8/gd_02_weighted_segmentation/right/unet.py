import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.a = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm = nn.GroupNorm(4, cout)
        self.b = nn.Conv2d(cout, cout, 3, padding=1)

    def forward(self, x):
        return F.relu(self.b(F.relu(self.norm(self.a(x)))))


class UNet(nn.Module):
    def __init__(self, classes, width=12):
        super().__init__()
        self.down1 = Block(1, width)
        self.down2 = Block(width, 2 * width)
        self.up = Block(3 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.head(self.up(torch.cat([a, b], 1)))

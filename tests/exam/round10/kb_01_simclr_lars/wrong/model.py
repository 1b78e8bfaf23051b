import torch.nn as nn
import torch.nn.functional as F


class ConvBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.gelu(self.norm(self.conv(x)))


class SimCLR(nn.Module):
    def __init__(self, width=16, dim=32):
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(3, width, 1), ConvBlock(width, 2 * width, 2), ConvBlock(2 * width, 4 * width, 2)])
        self.projector = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, dim))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return F.normalize(self.projector(x.mean((2, 3))), dim=-1)

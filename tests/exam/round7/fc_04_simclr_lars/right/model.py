import torch.nn as nn
import torch.nn.functional as F


class ConvBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


class Encoder(nn.Module):
    def __init__(self, width=12, out=16):
        super().__init__()
        self.blocks = nn.ModuleList([ConvBlock(3, width), ConvBlock(width, 2 * width)])
        self.proj = nn.Sequential(nn.Linear(2 * width, 32), nn.ReLU(), nn.Linear(32, out))

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return F.normalize(self.proj(x.mean((2, 3))), dim=-1)

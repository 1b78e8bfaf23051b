import torch
import torch.nn as nn


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.norm = nn.GroupNorm(2, cout)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        return torch.relu(self.norm(self.conv2(x)))


class TinyUNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.enc1 = Stage(1, width)
        self.enc2 = Stage(width, 2 * width)
        self.dec1 = Stage(3 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(nn.functional.max_pool2d(a, 2))
        b = nn.functional.interpolate(b, scale_factor=2)
        return self.head(self.dec1(torch.cat([a, b], dim=1)))

import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.skip(x))


class SimCLR(nn.Module):
    def __init__(self, width=16, dim=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.blocks = nn.ModuleList([Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)])
        self.head = nn.Sequential(nn.Linear(64 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, dim))

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return F.normalize(self.head(x.flatten(1)), dim=-1)

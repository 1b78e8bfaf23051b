import torch.nn as nn


class DepthwiseBlock(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.depth = nn.Conv2d(cin, cin, 3, stride=stride, padding=1, groups=cin)
        self.point = nn.Conv2d(cin, cout, 1)
        self.norm = nn.GroupNorm(4, cout)
        self.act = nn.Hardswish()

    def forward(self, x):
        return self.act(self.norm(self.point(self.depth(x))))


class MobileNet(nn.Module):
    """Small classifier for 12x12 images, meant for a phone."""

    def __init__(self, classes=6, width=16):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList([
            DepthwiseBlock(width, 2 * width, 2),
            DepthwiseBlock(2 * width, 2 * width, 1),
            DepthwiseBlock(2 * width, 4 * width, 2),
        ])
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))

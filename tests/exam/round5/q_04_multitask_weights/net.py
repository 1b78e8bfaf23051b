import torch.nn as nn
import torch.nn.functional as F


class Stage(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.a = nn.Conv2d(c, c, 3, padding=1)
        self.b = nn.Conv2d(c, c, 1)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


class DensePredictor(nn.Module):
    def __init__(self, c=16, classes=3, depth=2):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, padding=1)
        self.stages = nn.ModuleList(Stage(c) for _ in range(depth))
        self.depth = nn.Conv2d(c, 1, 1)
        self.seg = nn.Conv2d(c, classes, 1)
        self.edge = nn.Conv2d(c, 1, 3, padding=1)

    def forward(self, x):
        h = self.stem(x)
        for s in self.stages:
            h = s(h)
        return {"depth": self.depth(h)[:, 0], "seg": self.seg(h), "edge": self.edge(h)[:, 0]}

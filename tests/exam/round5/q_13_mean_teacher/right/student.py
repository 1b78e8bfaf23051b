import torch
import torch.nn as nn
import torch.nn.functional as F


class Cell(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 1)

    def forward(self, x):
        return x + self.b(F.silu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, c=16, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, c, 3, 2, 1)
        self.cells = nn.ModuleList(Cell(c) for _ in range(2))
        self.head = nn.Linear(c, classes)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("std", torch.ones(1))

    def forward(self, x):
        x = self.stem((x - self.mean) / self.std)
        for c in self.cells:
            x = c(x)
        return self.head(x.mean((2, 3)))

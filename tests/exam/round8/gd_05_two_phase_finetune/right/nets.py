import torch.nn as nn
import torch.nn.functional as F


class Trunk(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.c1 = nn.Conv2d(1, width, 3, padding=1)
        self.c2 = nn.Conv2d(width, width, 3, padding=1, stride=2)
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x):
        return F.relu(self.norm(self.c2(F.relu(self.c1(x))))).mean((2, 3))


class Classifier(nn.Module):
    def __init__(self, trunk, width=16, classes=6):
        super().__init__()
        self.trunk = trunk
        self.head = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, classes))

    def forward(self, x):
        return self.head(self.trunk(x))

import torch
import torch.nn as nn


class ConvBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(ch, ch, 3, padding=1), nn.Conv1d(ch, ch, 3, padding=1)
        self.norm = nn.GroupNorm(2, ch)

    def forward(self, x):
        return x + self.conv2(torch.relu(self.norm(self.conv1(x))))


class WaveNet(nn.Module):
    def __init__(self, ch=12, depth=3, classes=4):
        super().__init__()
        self.stem = nn.Conv1d(1, ch, 5, padding=2)
        self.blocks = nn.ModuleList(ConvBlock(ch) for _ in range(depth))
        self.head = nn.Linear(ch, classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x.amax(-1))

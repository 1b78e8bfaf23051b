import torch
import torch.nn as nn


class ConvNeXtBlock(nn.Module):
    def __init__(self, ch, drop_path):
        super().__init__()
        self.dw = nn.Conv2d(ch, ch, 5, padding=2, groups=ch)
        self.norm = nn.LayerNorm(ch)
        self.fc1, self.fc2 = nn.Linear(ch, 3 * ch), nn.Linear(3 * ch, ch)
        self.gamma = nn.Parameter(torch.full((ch,), 0.5))
        self.drop_path = drop_path

    def forward(self, x, u):
        h = self.norm(self.dw(x).permute(0, 2, 3, 1))
        h = (self.gamma * self.fc2(torch.nn.functional.gelu(self.fc1(h)))).permute(0, 3, 1, 2)
        if self.training:
            h = h * (u >= self.drop_path)[:, None, None, None] / (1 - self.drop_path)
        return x + h


class ConvNeXt(nn.Module):
    """Stochastic depth takes its uniform numbers as an input: one per image and block."""

    def __init__(self, classes=6, ch=16, depth=3, drop_path=0.2):
        super().__init__()
        self.stem = nn.Conv2d(3, ch, 2, stride=2)
        self.blocks = nn.ModuleList([ConvNeXtBlock(ch, drop_path * (i + 1) / depth) for i in range(depth)])
        self.norm, self.head = nn.LayerNorm(ch), nn.Linear(ch, classes)

    def forward(self, x, u):
        x = self.stem(x)
        for i, block in enumerate(self.blocks):
            x = block(x, u[:, i])
        return self.head(self.norm(x.mean((2, 3))))

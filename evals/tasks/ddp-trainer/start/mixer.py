"""An MLP-mixer for rows of measurements."""

from torch import nn


class Mix(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.SiLU(), nn.Linear(2 * tokens, tokens))
        self.over_width = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_width(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, features=8, tokens=12, width=40, depth=3, classes=6):
        super().__init__()
        self.stem = nn.Linear(features, width)
        self.mixes = nn.ModuleList(Mix(tokens, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for mix in self.mixes:
            x = mix(x)
        return self.head(self.norm(x).mean(dim=1))

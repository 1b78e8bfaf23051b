import torch
import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, z=12, ch=16, size=8):
        super().__init__()
        self.ch, self.start = ch, size // 4
        self.fc = nn.Linear(z, 2 * ch * self.start ** 2)
        self.body = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * ch, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.SiLU(),
                                  nn.Upsample(scale_factor=2), nn.Conv2d(ch, ch, 3, padding=1), nn.SiLU())
        self.rgb = nn.Conv2d(ch, 3, 1)

    def forward(self, z):
        h = self.fc(z).view(len(z), 2 * self.ch, self.start, self.start)
        return torch.tanh(self.rgb(self.body(h)))


class Critic(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, ch, 3, 2, 1), nn.SiLU(), nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.SiLU())
        self.score = nn.Linear(2 * ch * 4, 1)

    def forward(self, x):
        return self.score(self.body(x).flatten(1)).squeeze(-1)

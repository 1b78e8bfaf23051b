import torch
import torch.nn as nn
import torch.nn.functional as F

from latents import FrozenImageEncoder, LatentScaler


class TimeBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.norm = nn.GroupNorm(4, ch)
        self.time = nn.Linear(8, ch)
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 1)

    def forward(self, x, temb):
        h = self.norm(x) + self.time(temb)[:, :, None, None]
        return x + self.conv2(F.silu(self.conv1(h)))


class LatentFlow(nn.Module):
    def __init__(self, ch=16, depth=2):
        super().__init__()
        self.encoder = FrozenImageEncoder()
        self.scaler = LatentScaler()
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.blocks = nn.ModuleList(TimeBlock(ch) for _ in range(depth))
        self.out = nn.Conv2d(ch, 3, 1)

    def encode(self, img):
        with torch.no_grad():
            return self.encoder(img)

    def forward(self, img, noise, t):
        z = self.scaler(self.encode(img))
        tt = t[:, None, None, None]
        zt = (1 - tt) * z + tt * noise
        temb = torch.cat([torch.sin(t[:, None] * k) for k in (1, 2, 4, 8)] + [torch.cos(t[:, None] * k) for k in (1, 2, 4, 8)], 1)
        h = self.inp(zt)
        for b in self.blocks:
            h = b(h, temb)
        return (self.out(h) - (noise - z)).square().mean()

import torch
import torch.nn as nn
import torch.nn.functional as F


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.dw = nn.Conv2d(cin, cin, 3, 2, 1, groups=cin)
        self.norm = nn.GroupNorm(1, cin)
        self.pw1, self.pw2 = nn.Conv2d(cin, 4 * cin, 1), nn.Conv2d(4 * cin, cout, 1)

    def forward(self, x):
        return self.pw2(F.gelu(self.pw1(self.norm(self.dw(x)))))


class LesionNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.stages = nn.ModuleList([Stage(ch, 2 * ch), Stage(2 * ch, 2 * ch)])
        self.head = nn.Linear(2 * ch * 16, 2)

    def forward(self, x):
        x = self.stem(x)
        for s in self.stages:
            x = s(x)
        return self.head(x.flatten(1))


def patches(n, seed, wrong_labels=0.0):
    """Patches with or without a lesion."""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    y = torch.randint(0, 2, (n,), generator=g)
    cx, cy = 4 + 8 * torch.rand(2, n, 1, 1, generator=g)
    spot = torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 8)
    x = 1.5 * spot * y[:, None, None] + 0.6 * torch.randn(n, 16, 16, generator=g)
    flip = torch.rand(n, generator=g) < wrong_labels
    return x[:, None], torch.where(flip, 1 - y, y)

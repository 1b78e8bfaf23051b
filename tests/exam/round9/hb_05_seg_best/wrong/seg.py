import torch
import torch.nn as nn
import torch.nn.functional as F


class SmallFCN(nn.Module):
    def __init__(self, n_classes=4, ch=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, ch, 3, padding=1), nn.ReLU(), nn.Conv2d(ch, ch * 2, 3, 2, 1), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(ch * 2, ch * 2, 3, padding=1), nn.ReLU())
        self.up = nn.Conv2d(ch * 2 + 3, n_classes, 3, padding=1)

    def forward(self, x):
        h = self.mid(self.down(x))
        h = F.interpolate(h, size=x.shape[-2:], mode="nearest")
        return self.up(torch.cat([h, x], 1))


def make_scenes(n, seed, noise):
    """Up to three coloured rectangles on a background; the mask holds the class per pixel."""
    g = torch.Generator().manual_seed(seed)
    img = torch.zeros(n, 3, 12, 12)
    mask = torch.zeros(n, 12, 12, dtype=torch.long)
    for i in range(n):
        for c in range(1, 4):
            y, x = torch.randint(0, 8, (2,), generator=g).tolist()
            h, w = torch.randint(3, 6, (2,), generator=g).tolist()
            mask[i, y : y + h, x : x + w] = c
        for c in range(1, 4):
            img[i, c - 1][mask[i] == c] = 1.0
    return img + noise * torch.randn(img.shape, generator=g), mask

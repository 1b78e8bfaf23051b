import torch
import torch.nn as nn
import torch.nn.functional as F


class ImageTower(nn.Module):
    def __init__(self, dim, ch=12):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, ch, 3, 2, 1), nn.GELU(), nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.GELU())
        self.proj = nn.Linear(2 * ch, dim)

    def forward(self, x):
        return F.normalize(self.proj(self.conv(x).mean((2, 3))), dim=-1)


class TextTower(nn.Module):
    def __init__(self, vocab, dim, width=24):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.position = nn.Parameter(torch.randn(6, width) * 0.1)
        self.proj = nn.Linear(width, dim)

    def forward(self, ids):
        h = self.mix(self.tok(ids) + self.position)
        return F.normalize(self.proj(h.amax(1)), dim=-1)


class Clip(nn.Module):
    def __init__(self, vocab, dim=16):
        super().__init__()
        self.image, self.text = ImageTower(dim), TextTower(vocab, dim)

    def forward(self, x, ids):
        return self.image(x), self.text(ids)

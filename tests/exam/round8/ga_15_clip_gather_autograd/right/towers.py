import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16 * 16, dim)

    def forward(self, x):
        return F.normalize(self.fc(F.gelu(self.conv(x)).flatten(1)), dim=-1)


class TextTower(nn.Module):
    def __init__(self, dim, vocab=30):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, 32, mode="mean")
        self.fc = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, dim))

    def forward(self, t):
        return F.normalize(self.fc(self.emb(t)), dim=-1)


class Temperature(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor([math.log(5.0)]))

    def forward(self, sim):
        return sim * self.log.exp()


class Clip(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image, self.text, self.temperature = ImageTower(dim), TextTower(dim), Temperature()

    def forward(self, img, txt, gather):
        i, t = gather(self.image(img)), gather(self.text(txt))
        logits = self.temperature(i @ t.t())
        y = torch.arange(len(logits))
        return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2

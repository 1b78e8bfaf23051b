import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from gather import gather_rows


class ImageTower(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 2 * width)
        self.proj = nn.Linear(2 * width * 9, out)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.norm(self.conv2(x)))
        return self.proj(x.flatten(1))


class TextTower(nn.Module):
    def __init__(self, vocab, width, out):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.encoder = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width)
        self.proj = nn.Linear(width, out)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.encoder(x)
        return self.proj(self.norm(x.mean(1)))


class Clip(nn.Module):
    def __init__(self, vocab, width=16, out=24):
        super().__init__()
        self.image = ImageTower(width, out)
        self.text = TextTower(vocab, width, out)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(10.0)))

    def forward(self, images, ids):
        img = F.normalize(self.image(images), dim=-1)
        txt = F.normalize(self.text(ids), dim=-1)
        return img, txt, self.logit_scale.exp()


def contrastive_loss(img, txt, scale, rank):
    """Own rows against the columns of all ranks, in both directions; the mean over the own rows."""
    labels = torch.arange(img.shape[0]) + rank * img.shape[0]
    image_logits = scale * img @ gather_rows(txt).T
    text_logits = scale * txt @ gather_rows(img).T
    return (F.cross_entropy(image_logits, labels) + F.cross_entropy(text_logits, labels)) / 2

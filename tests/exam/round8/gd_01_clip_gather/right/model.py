import torch
import torch.nn as nn
import torch.nn.functional as F


class ImageTower(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, stride=2)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, stride=2)
        self.proj = nn.Linear(2 * width, out)

    def forward(self, x):
        x = F.gelu(self.conv1(x))
        x = F.gelu(self.conv2(x))
        return self.proj(x.mean((2, 3)))


class TextTower(nn.Module):
    def __init__(self, vocab, dim, out):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attn = nn.MultiheadAttention(dim, 4, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.proj = nn.Linear(dim, out)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return self.proj(self.norm(x).mean(1))


class TwoTowers(nn.Module):
    def __init__(self, vocab=48, dim=32, out=24):
        super().__init__()
        self.image = ImageTower(16, out)
        self.text = TextTower(vocab, dim, out)
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, pixels, ids):
        image = F.normalize(self.image(pixels), dim=-1)
        text = F.normalize(self.text(ids), dim=-1)
        return image, text, self.log_scale.exp().clamp(max=100.0)

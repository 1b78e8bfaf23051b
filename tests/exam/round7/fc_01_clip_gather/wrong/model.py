"""Two small towers that embed (image, caption) pairs in one space."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ImageTower(nn.Module):
    def __init__(self, in_dim=48, dim=32, embed=16, depth=2):
        super().__init__()
        self.stem = nn.Linear(in_dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, embed, bias=False)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return F.normalize(self.head(x), dim=-1)


class TextTower(nn.Module):
    def __init__(self, vocab=64, dim=32, embed=16, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, embed, bias=False)

    def forward(self, ids):
        x = self.tok(ids)
        for b in self.blocks:
            x = b(x)
        return F.normalize(self.head(x.mean(dim=1)), dim=-1)


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = ImageTower()
        self.text = TextTower()
        self.logit_scale = nn.Parameter(torch.full((1,), 2.3))

    def forward(self, pixels, ids):
        return self.image(pixels), self.text(ids), self.logit_scale.exp()

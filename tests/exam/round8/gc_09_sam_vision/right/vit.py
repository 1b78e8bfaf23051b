import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class ViT(nn.Module):
    def __init__(self, size=12, patch=3, d=32, depth=2, classes=5):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(patch * patch, d)
        self.pos = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, d))
        self.blocks = nn.ModuleList(Block(d, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, x):
        x = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        x = self.embed(x) + self.pos
        for b in self.blocks:
            x = b(x)
        return self.head(self.norm(x).mean(1))

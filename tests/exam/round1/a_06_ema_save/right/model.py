import torch.nn as nn
import torch.nn.functional as F


class GatedBlock(nn.Module):
    """Causal depth-wise convolution with a SwiGLU feed-forward."""

    def __init__(self, dim, kernel=4):
        super().__init__()
        self.kernel = kernel
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.mix = nn.Linear(dim, dim)
        self.w12, self.w3 = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        h = F.pad(self.norm1(x).transpose(1, 2), (self.kernel - 1, 0))
        x = x + self.mix(F.silu(self.conv(h)).transpose(1, 2))
        a, b = self.w12(self.norm2(x)).chunk(2, -1)
        return x + self.w3(F.silu(a) * b)


class ConvLM(nn.Module):
    def __init__(self, vocab=40, dim=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(GatedBlock(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for b in self.blocks:
            x = b(x)
        return self.out(self.norm(x))

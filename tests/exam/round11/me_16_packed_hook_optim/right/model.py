import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedConv(nn.Module):
    """Causal gated convolution block."""

    def __init__(self, dim, kernel):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, kernel)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (self.kernel - 1, 0))
        a, b = self.conv(h).transpose(1, 2).chunk(2, dim=-1)
        return x + self.out(a * torch.sigmoid(b))


class ConvLM(nn.Module):
    def __init__(self, vocab=32, dim=32, depth=3, kernel=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([GatedConv(dim, kernel) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

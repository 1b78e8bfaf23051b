import torch
import torch.nn as nn


class ConvGLU(nn.Module):
    """Causal depthwise convolution followed by a gated MLP."""

    def __init__(self, dim, k=4):
        super().__init__()
        self.k = k
        self.norm = nn.RMSNorm(dim)
        self.conv = nn.Conv1d(dim, dim, k, groups=dim)
        self.w_in = nn.Linear(dim, 4 * dim, bias=False)
        self.w_out = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        h = self.norm(x).transpose(1, 2)
        h = self.conv(nn.functional.pad(h, (self.k - 1, 0))).transpose(1, 2)
        a, b = self.w_in(h).chunk(2, dim=-1)
        return x + self.w_out(a * torch.sigmoid(b))


class ConvLM(nn.Module):
    def __init__(self, vocab, dim=48, depth=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(ConvGLU(dim) for _ in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))

import torch
import torch.nn as nn
import torch.nn.functional as F


class GatedConv(nn.Module):
    """Causal convolution with a gate and a residual."""

    def __init__(self, dim, width, dilation):
        super().__init__()
        self.pad = (width - 1) * dilation
        self.norm = nn.RMSNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, width, dilation=dilation)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (self.pad, 0))
        value, gate = self.conv(h).chunk(2, dim=1)
        return x + (value * gate.sigmoid()).transpose(1, 2)


class ConvLM(nn.Module):
    def __init__(self, vocab, dim=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GatedConv(dim, 3, 2 ** i) for i in range(depth))
        self.norm = nn.RMSNorm(dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))

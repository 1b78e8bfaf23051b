import torch
import torch.nn as nn


class CausalConv(nn.Module):
    def __init__(self, d, k=3):
        super().__init__()
        self.k = k
        self.conv = nn.Conv1d(d, 2 * d, k)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        h = self.norm(x).transpose(1, 2)
        h = self.conv(nn.functional.pad(h, (self.k - 1, 0)))
        return x + nn.functional.glu(h, 1).transpose(1, 2)


class ConvLM(nn.Module):
    def __init__(self, vocab=29, d=20, depth=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(CausalConv(d) for _ in range(depth))
        self.out = nn.Linear(d, vocab)

    def forward(self, x):
        h = self.emb(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h)

import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, 3)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = nn.functional.pad(self.norm(x).transpose(1, 2), (2, 0))
        a, b = self.conv(h).transpose(1, 2).chunk(2, -1)
        return x + self.out(a * torch.sigmoid(b))


class ConvLM(nn.Module):
    def __init__(self, vocab, dim, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

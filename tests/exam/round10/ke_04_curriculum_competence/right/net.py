import torch
import torch.nn as nn


class Adder(nn.Module):
    def __init__(self, width, dim=32, depth=2):
        super().__init__()
        self.emb = nn.Embedding(20, dim)
        self.pos = nn.Parameter(torch.randn(2 * width, dim) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, activation="gelu", batch_first=True) for _ in range(depth)
        )
        self.out = nn.Linear(dim, 10, bias=False)
        self.width = width

    def forward(self, x):
        h = self.emb(x) + self.pos
        for layer in self.layers:
            h = layer(h)
        return self.out(h[:, : self.width] + h[:, self.width :])

import torch
import torch.nn as nn


class Prefix(nn.Module):
    """Learned prefix vectors, the only weights that are tuned besides the head."""

    def __init__(self, n, dim):
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(n, dim) * 0.1)

    def forward(self, h):
        return torch.cat([self.vectors.expand(len(h), -1, -1), h], 1)


class PrefixClassifier(nn.Module):
    def __init__(self, vocab=40, dim=24, classes=2, layers=2, prefix=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.prefix = Prefix(prefix, dim)
        self.body = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 2, 48, dropout=0.0, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(dim, classes)

    def forward(self, ids):
        h = self.prefix(self.embed(ids))
        for layer in self.body:
            h = layer(h)
        return self.head(h.mean(1))

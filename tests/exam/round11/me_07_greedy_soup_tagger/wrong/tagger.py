import torch
import torch.nn as nn


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tagger(nn.Module):
    """Multi-label tagger over bags of tokens."""

    def __init__(self, vocab=200, dim=32, tags=8, layers=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mixers = nn.ModuleList([Mixer(dim) for _ in range(layers)])
        self.head = nn.Linear(dim, tags)

    def forward(self, ids):
        x = self.emb(ids).mean(dim=1)
        for m in self.mixers:
            x = m(x)
        return self.head(x)


def make_docs(n, seed, vocab=200, tags=8, length=20):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocab, tags, generator=torch.Generator().manual_seed(1234))
    ids = torch.randint(vocab, (n, length), generator=g)
    score = weight[ids].mean(1) * length**0.5 + 0.8 * torch.randn(n, tags, generator=g)
    return ids, (score > 0.3).float()

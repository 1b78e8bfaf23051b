import torch
import torch.nn as nn


class Reader(nn.Module):
    """A frozen random encoder whose soft prompt and read-out are tuned."""

    def __init__(self, vocab=60, dim=16, prompt=6, classes=3):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, dim))
        self.prompt = nn.Parameter(0.1 * torch.randn(prompt, dim))
        self.out = nn.Linear(dim, classes)
        self.emb.requires_grad_(False)
        self.mix.requires_grad_(False)

    def forward(self, ids):
        x = self.emb(ids)
        att = torch.softmax(x @ self.prompt.T / x.shape[-1] ** 0.5, dim=1)
        pooled = (att.transpose(1, 2) @ self.mix(x)).mean(1)
        return self.out(pooled)


def make_reviews(n, seed, vocab=60, length=12, classes=3):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (n,), generator=g)
    ids = torch.randint(vocab, (n, length), generator=g)
    hit = torch.rand(n, length, generator=g) < 0.4
    topical = torch.randint(vocab // classes, (n, length), generator=g) * classes + y[:, None]
    return torch.where(hit, topical, ids), y

"""Keyword spotting on synthetic spectrograms."""
import torch
import torch.nn as nn

KEYWORDS, BINS, FRAMES = 8, 12, 20


def make_corpus(size=240, seed=4):
    g = torch.Generator().manual_seed(seed)
    templates = torch.randn(KEYWORDS, BINS, FRAMES, generator=g)
    labels = torch.randint(0, KEYWORDS, (size,), generator=g)
    feats = templates[labels] + 1.5 * torch.randn(size, BINS, FRAMES, generator=g)
    return feats, labels


def spec_augment(x):
    """Masks one band of frequencies and one stretch of time in every utterance."""
    x = x.clone()
    for row in x:
        f = int(torch.randint(0, BINS - 2, ()))
        t = int(torch.randint(0, FRAMES - 4, ()))
        row[f : f + 2] = 0
        row[:, t : t + 4] = 0
    return x


class KeywordNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.stem = nn.Conv1d(BINS, dim, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(dim, dim, 3, padding=1), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)
        )
        self.head = nn.Linear(dim, KEYWORDS)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(-1))

import torch
import torch.nn as nn


class ConvBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.lin = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.lin(torch.tanh(h))


class Translator(nn.Module):
    """One encoder for all source languages, word-by-word output in the target language."""

    def __init__(self, vocab, target_vocab, dim=32, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(ConvBlock(dim) for _ in range(depth))
        self.out = nn.Linear(dim, target_vocab, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = b(x)
        return x, self.out(x)


class LanguageCritic(nn.Module):
    """Guesses the source language from the encoder states."""

    def __init__(self, dim=32, languages=3, hidden=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(dim, hidden), nn.LeakyReLU(0.2), nn.Linear(hidden, hidden), nn.LeakyReLU(0.2))
        self.out = nn.Linear(hidden, languages)

    def forward(self, states):
        return self.out(self.body(states).mean(1))

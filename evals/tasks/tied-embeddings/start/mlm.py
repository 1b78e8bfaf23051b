"""Masked-language model: a bidirectional encoder whose decoder shares the embedding's weight."""

import torch
from torch import nn


class EncoderBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
        self.feed_norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.attention_norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.feed_norm(x + self.feed(x))


class MaskedLM(nn.Module):
    def __init__(self, vocab=80, length=14, width=40, heads=4, depth=2):
        super().__init__()
        self.word = nn.Embedding(vocab, width)
        self.place = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.encoder = nn.ModuleList(EncoderBlock(width, heads) for _ in range(depth))
        self.decoder = nn.Linear(width, vocab)
        for module in (self.word, self.place):
            nn.init.normal_(module.weight, std=0.1)
        self.decoder.weight = self.word.weight

    def forward(self, words):
        x = self.norm(self.word(words) + self.place(torch.arange(words.shape[1])))
        for block in self.encoder:
            x = block(x)
        return self.decoder(x)

"""The model."""

from __future__ import annotations

import torch
from torch import nn

from .layers import Block, RMSNorm, initialise
from .settings import Settings


class Writer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        own, length, vocab = settings.model, settings.text.length, settings.text.vocab
        self.tokens = nn.Embedding(vocab, own.width)
        self.blocks = nn.ModuleList(Block(own.width, own.heads, length, hidden=own.hidden) for _ in range(own.layers))
        self.norm = RMSNorm(own.width)
        self.head = nn.Linear(own.width, vocab, bias=False)
        initialise(self, own.layers)

    def forward(self, words: torch.Tensor) -> torch.Tensor:  # [n, t] -> [n, t, vocab]
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

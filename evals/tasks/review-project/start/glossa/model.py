"""The model. The embedding of a word is also its row of the output layer."""

from __future__ import annotations

import torch
from torch import nn

from .layers import Block, RMSNorm, initialise
from .settings import Settings
from .text import PAD


class MaskedModel(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, length, vocab = settings.model.width, settings.text.length, settings.text.vocab
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            Block(width, settings.model.heads, length, causal=False) for _ in range(settings.model.layers)
        )
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        initialise(self, settings.model.layers)
        self.head.weight = self.tokens.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:  # [n, t] -> [n, t, vocab]
        keep = words != PAD
        x = self.tokens(words)
        for block in self.blocks:
            x = block(x, keep)
        return self.head(self.norm(x))

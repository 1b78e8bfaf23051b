"""A bidirectional encoder with one linear layer on top."""

from __future__ import annotations

import torch
from torch import nn

from .layers import Block, RMSNorm, initialise
from .sentences import PAD
from .settings import Settings


class Tagger(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        model, sentences = settings.model, settings.sentences
        self.embed = nn.Embedding(sentences.words, model.width)
        self.blocks = nn.ModuleList(
            Block(model.width, model.heads, sentences.longest, causal=False) for _ in range(model.layers)
        )
        self.norm = RMSNorm(model.width)
        self.tags = nn.Linear(model.width, sentences.tags)
        initialise(self, model.layers, std=0.1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:  # [n, t] -> [n, t, tags]
        keep = words != PAD
        x = self.embed(words)
        for block in self.blocks:
            x = block(x, keep)
        return self.tags(self.norm(x))

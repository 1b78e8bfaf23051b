"""The model. A book's embedding serves for what was read and for what is offered; offers have a bias, the book's popularity."""

from __future__ import annotations

import torch
from torch import nn

from .layers import Block, RMSNorm, initialise
from .settings import Settings


class Offers(nn.Module):
    """Scores of all books, from the embeddings and the popularity."""

    def __init__(self, books: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(books, width))
        self.popularity = nn.Parameter(torch.zeros(books))
        self.scale = width**-0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, t, width] -> [n, t, books]
        return self.scale * x @ self.weight.T + self.popularity


class Recommender(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, books = settings.model.width, settings.readers.books
        self.books = nn.Embedding(books, width)
        self.blocks = nn.ModuleList(
            Block(width, settings.model.heads, settings.readers.longest) for _ in range(settings.model.layers)
        )
        self.norm = RMSNorm(width)
        self.offers = Offers(books, width)
        self.offers.weight = self.books.weight
        initialise(self, settings.model.layers, std=0.2)

    def forward(self, loans: torch.Tensor) -> torch.Tensor:  # [n, t] -> [n, t, books]
        x = self.books(loans)
        for block in self.blocks:
            x = block(x)
        return self.offers(self.norm(x))

"""Encoder and decoder. Hidden tiles are replaced by a learned one, so that every image has the same shape."""

from __future__ import annotations

import torch
from torch import nn

from .layers import Block, RMSNorm, initialise
from .settings import Settings


class Autoencoder(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        model, images = settings.model, settings.images
        tiles, pixels = (images.side // images.tile) ** 2, images.tile**2
        self.enter = nn.Linear(pixels, model.width)
        self.positions = nn.Parameter(torch.zeros(tiles, model.width))
        self.unknown = nn.Parameter(torch.zeros(1, model.width))
        self.encoder = nn.ModuleList(Block(model.width, model.heads, tiles, causal=False) for _ in range(model.layers))
        self.between = RMSNorm(model.width)
        self.decoder = nn.ModuleList(Block(model.width, model.heads, tiles, causal=False) for _ in range(model.decoder))
        self.norm = RMSNorm(model.width)
        self.leave = nn.Linear(model.width, pixels)
        initialise(self, model.layers + model.decoder, std=0.06)

    @property
    def layers(self) -> list[nn.Module]:
        return [*self.encoder, *self.decoder]

    def forward(self, tiles: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Tiles [n, t, pixels] and which are hidden [n, t] -> all tiles as the model paints them."""
        x = torch.where(hidden[..., None], self.unknown, self.enter(tiles)) + self.positions
        for block in self.encoder:
            x = block(x)
        x = self.between(x)
        for block in self.decoder:
            x = block(x)
        return self.leave(self.norm(x))


def painting_loss(painted: torch.Tensor, tiles: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The mean squared error of the hidden tiles."""
    return (painted - tiles).square().mean(dim=-1)[hidden].mean()

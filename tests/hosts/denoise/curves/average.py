"""Averaged weights as a second network, laid out like the first."""

from __future__ import annotations

import torch
from torch import nn

from .network import Denoiser
from .presets import Shape
from .spread import settle, spread


class Average:
    """The network that is sampled from. It is never trained, only drawn towards the one that is."""

    def __init__(self, shape: Shape, mesh: torch.distributed.DeviceMesh, device: torch.device, keep: float) -> None:
        self.keep = keep
        self.network = spread(Denoiser(shape).to(device).requires_grad_(False), mesh)

    @torch.no_grad()
    def copy(self, network: nn.Module) -> None:
        """Start from the weights of another network."""
        self._draw(network, 1.0)

    def follow(self, network: nn.Module) -> None:
        """One step towards another network."""
        self._draw(network, 1 - self.keep)

    @torch.no_grad()
    def _draw(self, network: nn.Module, share: float) -> None:
        settle(self.network)
        for mine, theirs in zip(self.network.parameters(), network.parameters(), strict=True):
            mine.lerp_(theirs, share)

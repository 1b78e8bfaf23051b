"""Batches with masked words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import comm
from .settings import Settings
from .text import IGNORED, corpora, masked_words, padded


@dataclass
class Masked:
    """Inputs and targets [n, t]; targets are IGNORED where no word is masked."""

    inputs: torch.Tensor
    targets: torch.Tensor

    @property
    def count(self) -> int:
        return int((self.targets != IGNORED).sum())

    def rows(self, index: torch.Tensor | slice) -> Masked:
        return Masked(self.inputs[index], self.targets[index])


class Documents:
    """The documents, and the masks of each step.

    Masks are drawn for the whole global batch from the seed and the step, and each rank takes its rows. If every rank drew its
    own they would depend on the number of ranks; if they came from the global generator they would be lost at a restart.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        training, held_out = corpora(settings.text)
        self.training = padded(training, settings.text.length)
        self.held_out = padded(held_out, settings.text.length)

    def of_step(self, step: int, indices: torch.Tensor) -> list[Masked]:
        """This rank's micro-batches of a global batch."""
        whole = self.masked(self.training[indices], 1 + step)
        pieces, world = self.settings.micro_batches, comm.world()
        if len(indices) % (pieces * world):
            raise ValueError(f"a batch of {len(indices)} is not made of {pieces} micro-batches on {world} ranks")
        own = torch.arange(comm.rank(), len(indices), world)
        return [whole.rows(piece) for piece in own.chunk(pieces)]

    def to_validate(self) -> tuple[Masked, int]:
        """This rank's held-out documents, and how many of them are its own.

        A rank that has one less than another takes the last document of all besides, which is not counted.
        """
        whole = self.masked(self.held_out, 0)
        documents, world = len(self.held_out), comm.world()
        each = -(-documents // world)
        own = torch.arange(comm.rank() * each, (comm.rank() + 1) * each)
        return whole.rows(own.clamp(max=documents - 1)), int((own < documents).sum())

    def masked(self, rows: torch.Tensor, number: int) -> Masked:
        return Masked(*masked_words(rows, self.settings.mask, 1_000_000 * self.settings.seed + number))

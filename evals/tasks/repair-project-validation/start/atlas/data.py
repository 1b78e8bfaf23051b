"""Training batches and the held-out documents."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .sampling import Batches, part
from .settings import Settings
from .text import corpora, next_words, padded

Pair = tuple[torch.Tensor, torch.Tensor]


class Corpus:
    """All documents in memory; each rank takes the rows that it needs."""

    def __init__(self, settings: Settings) -> None:
        training, held_out = corpora(settings.text)
        self.rows = padded(training, settings.text.length)
        self.pieces = settings.micro_batches
        self.batches = Batches(len(self.rows), settings.batch, settings.seed)
        # Documents of about one length together, so that a batch has little padding
        self.held_out = padded(sorted(held_out, key=len), settings.text.length)

    def steps(self) -> Iterator[list[Pair]]:
        """For each step this rank's micro-batches, as inputs and targets [n, t - 1]."""
        for indices in self.batches:
            yield [next_words(self.rows[own]) for own in part(indices, self.pieces)]

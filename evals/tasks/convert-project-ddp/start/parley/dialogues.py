"""Dialogues: a question and an answer. Only the answer is learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import comm
from .settings import Settings
from .text import IGNORED, corpora, next_words, padded

Pair = tuple[torch.Tensor, torch.Tensor]


def answers_only(rows: torch.Tensor) -> Pair:
    """Inputs and targets [n, t - 1]; the first third of each dialogue is the question."""
    inputs, targets = next_words(rows)
    length = (targets != IGNORED).sum(dim=1, keepdim=True)
    position = torch.arange(targets.shape[1])
    targets[position < length // 3] = IGNORED
    return inputs, targets


class Dialogues:
    """Global batches, epoch after epoch. All dialogues of an epoch are used: its last batch has what is left."""

    def __init__(self, settings: Settings) -> None:
        training, held_out = corpora(settings.text)
        self.training = padded(training, settings.text.length)
        self.held_out = padded(held_out, settings.text.length)
        self.batch, self.pieces, self.seed = settings.batch, settings.micro_batches, settings.seed
        self.done = 0

    @property
    def each_epoch(self) -> int:
        return -(-len(self.training) // self.batch)

    def order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_009 + epoch)
        return torch.randperm(len(self.training), generator=generator)

    def steps(self) -> Iterator[list[Pair]]:
        """For each step this rank's micro-batches."""
        while True:
            epoch, at = divmod(self.done, self.each_epoch)
            self.done += 1
            yield self.own(self.order(epoch)[at * self.batch : (at + 1) * self.batch])

    def own(self, indices: torch.Tensor) -> list[Pair]:
        """This rank's part of a global batch, in micro-batches. In a small batch a rank may have fewer of them than another."""
        mine = indices[comm.rank() :: comm.world()]
        return [answers_only(self.training[piece]) for piece in mine.chunk(self.pieces)]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]

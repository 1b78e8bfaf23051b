"""Global batches, cut for the ranks. The position counts samples of the whole world, so it survives a change of the world."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .corpus import Corpus

IGNORE = -100


class Loader:
    """Iterates over micro-batches of this rank; `position` moves by one global batch at a time."""

    def __init__(self, corpus: Corpus, context: int, global_batch: int, seed: int, part: int, parts: int) -> None:
        if global_batch % parts:
            raise SystemExit(f"a global batch of {global_batch} cannot be cut for {parts} ranks")
        self.corpus, self.context, self.global_batch, self.seed = corpus, context, global_batch, seed
        self.part, self.parts = part, parts
        self.position = 0
        self._order: tuple[int, np.ndarray] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Samples that the whole world has taken."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the samples of a saved run."""
        self.position = int(state["position"])

    def step(self, micro_batch: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the next optimizer step: (tokens, labels) each."""
        local = self.global_batch // self.parts
        size = min(micro_batch, local)
        mine = range(self.position + self.part * local, self.position + (self.part + 1) * local)
        self.position += self.global_batch
        return [self._collate(mine[start : start + size]) for start in range(0, local, size)]

    def _collate(self, samples: range) -> tuple[Tensor, Tensor]:
        rows = [self._row(sample) for sample in samples]
        tokens = torch.stack([row[:-1] for row in rows])
        labels = torch.stack([row[1:] for row in rows])
        return tokens.clamp_min(0), labels

    def _row(self, sample: int) -> Tensor:
        """One document, cut or filled up to the context; the filling is no label."""
        epoch, index = divmod(sample, len(self.corpus))
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.corpus.order(epoch, self.seed))
        words = torch.from_numpy(self.corpus.documents[self._order[1][index]])[: self.context + 1]
        row = torch.full((self.context + 1,), IGNORE, dtype=torch.long)
        row[: len(words)] = words
        return row


def label_count(batches: list[tuple[Tensor, Tensor]]) -> int:
    """Labels that count, in these micro-batches."""
    return sum(int((labels != IGNORE).sum()) for _, labels in batches)

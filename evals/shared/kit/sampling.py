"""Which samples make which step. The order depends on the seed and the epoch, never on the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import comm


class Batches:
    """Global batches without end, in an order that is shuffled anew in each epoch; the rest of an epoch is dropped.

    Its state is the number of batches that were handed out, so that a run can go on at the next one, on any number of ranks.
    """

    def __init__(self, samples: int, size: int, seed: int = 0) -> None:
        if size > samples:
            raise ValueError(f"a batch of {size} from {samples} samples")
        self.samples, self.size, self.seed = samples, size, seed
        self.done = 0

    @property
    def each_epoch(self) -> int:
        return self.samples // self.size

    @property
    def epoch(self) -> int:
        return self.done // self.each_epoch

    def order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
        return torch.randperm(self.samples, generator=generator)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Indices of global batches [size], the same on every rank."""
        known, order = -1, torch.empty(0)
        while True:
            epoch, at = divmod(self.done, self.each_epoch)
            if epoch != known:
                known, order = epoch, self.order(epoch)
            self.done += 1
            yield order[at * self.size : (at + 1) * self.size]

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise ValueError(f"the checkpoint was made with seed {state['seed']}, this run has {self.seed}")
        self.done = state["done"]


def part(indices: torch.Tensor, pieces: int = 1) -> list[torch.Tensor]:
    """This rank's micro-batches of a global batch: rows rank, rank + world, ... of each of the pieces."""
    if len(indices) % (pieces * comm.world()):
        raise ValueError(f"{len(indices)} samples for {comm.world()} ranks of {pieces} micro-batches")
    return [piece[comm.rank() :: comm.world()] for piece in indices.chunk(pieces)]

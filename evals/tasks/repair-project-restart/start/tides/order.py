"""The order of the samples: shuffled anew in each epoch, the same on any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

from . import comm


class Order:
    """An iterator over global batches of indices. The samples that do not fill a batch at the end of an epoch are left out.

    It shuffles when an epoch begins, since there are a few million windows in the real set and that takes its time.
    """

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        if batch > samples:
            raise ValueError(f"a batch of {batch} from {samples} samples")
        self.samples, self.batch, self.seed = samples, batch, seed
        self.epoch, self.position = 0, 0
        self.shuffled = self.shuffle(self.epoch)

    def shuffle(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1_000 * self.seed + epoch)
        return torch.randperm(self.samples, generator=generator)

    def __iter__(self) -> Order:
        return self

    def __next__(self) -> torch.Tensor:
        if (self.position + 1) * self.batch > self.samples:
            self.epoch, self.position = self.epoch + 1, 0
            self.shuffled = self.shuffle(self.epoch)
        begin = self.position * self.batch
        self.position += 1
        return self.shuffled[begin : begin + self.batch]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = state["epoch"]
        self.position = state["position"]


def own(indices: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global batch."""
    if len(indices) % comm.world():
        raise ValueError(f"a batch of {len(indices)} for {comm.world()} ranks")
    return indices.chunk(comm.world())[comm.rank()]

"""Training batches of this rank, epoch after epoch, from any position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class EpochLoader:
    """Micro-batches of one optimizer step at a time. Knows its epoch and how many steps of it are done."""

    def __init__(
        self, dataset: Dataset[Any], rank: int, size: int, global_batch: int, accumulate: int, seed: int
    ) -> None:
        if global_batch % (size * accumulate):
            raise ValueError(f"a batch of {global_batch} is not {accumulate} micro-batches on {size} ranks")
        self.dataset, self.accumulate = dataset, accumulate
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=size, rank=rank, shuffle=True, seed=seed, drop_last=True
        )
        micro_batch = global_batch // (size * accumulate)
        quiet = torch.Generator().manual_seed(seed)
        self.loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=micro_batch, sampler=self.sampler, drop_last=True, generator=quiet
        )
        self.steps_per_epoch = len(self.loader) // accumulate

    def steps(self, epoch: int, done: int) -> Iterator[list[Any]]:
        """The steps of an epoch that are left when `done` of them were taken."""
        self.sampler.set_epoch(epoch)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        batches = islice(iter(self.loader), done * self.accumulate, self.steps_per_epoch * self.accumulate)
        while window := list(islice(batches, self.accumulate)):
            yield window

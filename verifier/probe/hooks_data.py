"""Listening to samplers: which order of which epoch a rank goes through."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DistributedSampler

from .measures import class_name
from .session import Session


def install(session: Session) -> None:
    """Note each time that a DistributedSampler begins an order."""
    begin, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch
    datasets: list[Any] = []  # kept, so that an id is never used twice

    @functools.wraps(begin)
    def iterated(self: DistributedSampler[Any]) -> Iterator[Any]:
        if all(self.dataset is not known for known in datasets):
            datasets.append(self.dataset)
        session.recorder.write(
            "sampler",
            cls=class_name(self),
            dataset=next(k for k, known in enumerate(datasets) if known is self.dataset),
            epoch=self.epoch,
            shuffle=bool(self.shuffle),
            seed=self.seed,
            samples=self.num_samples,
            at_line=session.recorder.here(),
        )
        return begin(self)

    @functools.wraps(set_epoch)
    def was_set(self: DistributedSampler[Any], epoch: int) -> None:
        session.recorder.write("set_epoch", epoch=int(epoch), at_line=session.recorder.here())
        set_epoch(self, epoch)

    DistributedSampler.__iter__ = iterated  # type: ignore[method-assign]
    DistributedSampler.set_epoch = was_set  # type: ignore[method-assign]

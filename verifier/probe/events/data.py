"""Samplers: which order of which epoch a rank goes through."""

from __future__ import annotations

from typing import Any

from ...trace.events import LoaderStarted, Sampler, SetEpoch
from ..dispatcher import Call
from ..session import Session


def install(session: Session) -> None:
    """Subscribe to DataLoader and DistributedSampler."""
    datasets: list[Any] = []  # kept, so that an id is never used twice

    def begins(call: Call) -> None:
        sampler = call.args[0]
        if all(sampler.dataset is not known for known in datasets):
            datasets.append(sampler.dataset)
        session.write(
            Sampler(
                dataset=next(k for k, known in enumerate(datasets) if known is sampler.dataset),
                epoch=sampler.epoch,
                shuffle=bool(sampler.shuffle),
                seed=sampler.seed,
                samples=sampler.num_samples,
                at_line=session.here(),
            )
        )

    def epoch_set(call: Call) -> None:
        session.write(SetEpoch())

    def loading(call: Call) -> None:
        dataset = call.args[0].dataset
        if hasattr(dataset, "__len__"):
            session.write(LoaderStarted(samples=len(dataset), step=session.step_number(), at_line=session.here()))

    session.dispatcher.around("torch.utils.data:DataLoader.__iter__", before=loading)
    session.dispatcher.around("torch.utils.data:DistributedSampler.__iter__", before=begins)
    session.dispatcher.around("torch.utils.data:DistributedSampler.set_epoch", before=epoch_set)

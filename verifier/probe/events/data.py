"""Samplers: the order and epoch that each rank iterates over."""

from typing import Any

from ...trace.events import LoaderStarted, Sampler, SetEpoch
from ..dispatcher import Call
from ..session import Session


def install(session: Session) -> None:
    datasets: dict[int, Any] = {}  # {id: dataset}, kept so that no id is used twice

    def begins(call: Call) -> None:
        sampler = call.args[0]
        datasets.setdefault(id(sampler.dataset), sampler.dataset)
        session.write(
            Sampler(
                dataset=list(datasets).index(id(sampler.dataset)),
                epoch=sampler.epoch,
                shuffle=bool(sampler.shuffle),
                seed=sampler.seed,
                samples=sampler.num_samples,
                at_line=session.here(),
            )
        )

    def loading(call: Call) -> None:
        dataset = call.args[0].dataset
        if hasattr(dataset, "__len__"):
            session.write(LoaderStarted(samples=len(dataset), step=session.step_number(), at_line=session.here()))

    session.around("torch.utils.data:DataLoader.__iter__", before=loading)
    session.around("torch.utils.data:DistributedSampler.__iter__", before=begins)
    session.around("torch.utils.data:DistributedSampler.set_epoch", before=lambda call: session.write(SetEpoch()))

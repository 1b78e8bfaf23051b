"""Samplers and drawn orders: what each rank iterates over, and in which epoch."""

import functools
import weakref
import zlib
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.utils.data

from ...trace.events import LoaderStarted, Order, Place, Sampler, SetEpoch
from ..dispatcher import Call
from ..frames import caller
from ..session import Session
from ..tensor_fingerprint import row_hashes

ORDERS = 256  # that are recorded of a line
LONGEST = 1 << 20
# of a RandomSampler, which knows of no other ranks: recorded where another sampler divides it
# torch's RandomSampler knows of no ranks: its order counts only where another sampler divides it
# (accelerate).
OWN_ORDER = "torch/utils/data/sampler.py"
# which argument is the order; None: the result
# The functions by which scripts draw an order; `random.Random.shuffle` was missed in round 10 (exam
# round 10, missed: an order by random.Random).
DRAWS = {"torch:randperm": None, "random:shuffle": 0, "random:Random.shuffle": 1}


def length(dataset: Any) -> int:
    """The samples of a data set; 0 where it has no length, or is a shard of one that has none
    (accelerate's of an iterable data set).
    """
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return 0


def install(session: Session) -> None:
    made: weakref.WeakKeyDictionary[Any, Place] = weakref.WeakKeyDictionary()
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
                parts=sampler.num_replicas,
                at_line=session.here(),
            )
        )

    def loading(call: Call) -> None:
        loader = call.args[0]
        samples = length(loader.dataset)
        step, place = session.progress.step_number(), session.here()
        session.write(
            LoaderStarted(samples=samples, step=step, made=made.get(loader), at_line=place)
        )

    def built(call: Call) -> None:
        if (place := session.here()) is not None:
            made[call.args[0]] = place

    session.around("torch.utils.data:DataLoader.__init__", before=built)
    session.around("torch.utils.data:DataLoader.__iter__", before=loading)
    session.around("torch.utils.data:DistributedSampler.__iter__", before=begins)
    session.around(
        "torch.utils.data:DistributedSampler.set_epoch",
        before=lambda call: session.write(SetEpoch()),
    )
    for function, position in DRAWS.items():
        session.around(function, after=functools.partial(_drawn, session, {}, position))


def _drawn(
    session: Session, last: dict[tuple[str, int, int], int], position: int | None, call: Call
) -> None:
    order = call.result if position is None else call.given(position, "x")
    own = caller()
    parts = _parts(own) if own.f_code.co_filename.endswith(OWN_ORDER) else 1
    if parts == 0 or not 1 < len(order) <= LONGEST:
        return
    if (digest := _digest(order)) is None or (place := session.here()) is None:
        return
    key = place.file, place.line, len(order)
    # Of the survey every draw is judged; an evaluation may draw the same order each time.
    whole = session.request.mode == "survey"
    new = torch.is_grad_enabled() if whole else digest != last.get(key)
    if new and session.first(key, most=ORDERS):
        last[key] = digest
        session.write(Order(samples=len(order), digest=digest, parts=parts, at_line=place))


def _parts(frame: FrameType | None) -> int:
    """In how many parts a sampler further up divides the order that a RandomSampler draws; 0 if it
    is not divided.
    """
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.utils.data.Sampler):
            parts = getattr(owner, "num_processes", 0) if hasattr(owner, "process_index") else 0
            if isinstance(parts, int) and parts > 1:
                return parts
        elif isinstance(owner, torch.utils.data.DataLoader):
            return 0
        frame = frame.f_back
    return 0


def _digest(order: torch.Tensor | Sequence[Any]) -> int | None:
    """The hash of an order; None of what is not known, or has no hash that other processes have
    too.
    """
    if not isinstance(order, torch.Tensor):
        # Only what has the same text in every process can be compared between ranks (no objects
        # with an address) (exam round 10, missed: orders of augmented samples).
        return zlib.crc32(repr(order).encode()) if all(map(_plain, order)) else None
    known = type(order) is torch.Tensor and order.numel() > 0 and order.device.type != "meta"
    return row_hashes([order.reshape(1, -1)])[0] if known else None


def _plain(one: object) -> bool:
    """Whether its text is the same in every process: numbers, texts, and tuples of these."""
    return isinstance(one, int | float | str | bytes) or (
        isinstance(one, tuple) and all(map(_plain, one))
    )

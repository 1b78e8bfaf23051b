"""Accumulation windows of the survey run that are shorter, and weigh less."""

from dataclasses import dataclass

from ..evidence import Evidence
from ..tolerances import NEAR
from ..trace import Trace
from ..trace.events import Accumulation, Batch, Divide, LoaderStarted, Order, Sampler


@dataclass(frozen=True)
class ShortAccumulation:
    """A window at the end of the data whose losses are divided as those of `full` backwards."""

    step: Accumulation
    full: int


def short_accumulation(evidence: Evidence) -> ShortAccumulation | None:
    """The first window that ends an epoch, has fewer backwards than the others, and has each loss
    divided by the number that the others have.

    None where the losses of full windows do not add up to their mean (sums, weights of tokens), the
    script sets the divisor of the gradients, or shorter windows are not at the end of the data:
    they have another meaning (a loss of a part of the steps, batches that are skipped).
    """
    survey = evidence.survey
    if survey is None or survey.all(Divide):
        return None
    for trace in survey.traces:
        windows = trace.of(Accumulation)
        full = max((one.batches for one in windows), default=1)
        short = [one for one in windows if one.batches < full]
        weights = [w for one in windows if one.batches == full and (w := _weight(one)) is not None]
        mean = bool(weights) and all(abs(weight - 1.0) <= NEAR for weight in weights)
        if full < 2 or not mean or not all(one in _ends(trace) for one in short):
            continue
        for one in short:
            weight = _weight(one)
            if weight is not None and abs(weight * full / one.batches - 1.0) <= NEAR:
                return ShortAccumulation(one, full)
    return None


def _weight(window: Accumulation) -> float | None:
    """The sum of the weights of a window's losses; None where it is not known."""
    if window.scale is None or window.changed is None:
        return None
    return window.batches * window.scale * window.changed


def _ends(trace: Trace) -> list[Accumulation]:
    """The windows after which data begin anew, or nothing is trained on."""
    found, last = [], None
    for record in trace.records:
        if isinstance(record, Accumulation):
            last = record
        elif isinstance(record, Batch):
            last = None
        elif isinstance(record, LoaderStarted | Sampler | Order) and last is not None:
            found.append(last)
    return [*found, *([last] if last is not None else [])]

"""Accumulation windows of the survey run that are shorter, and weigh less."""

from dataclasses import dataclass, replace

from ..evidence import Evidence
from ..tolerances import NEAR
from ..trace import Trace
from ..trace.events import Accumulation, Batch, Divide, LoaderStarted, Order, Sampler


@dataclass(frozen=True)
class ShortAccumulation:
    """A window at the end of the data, or the first one of all, whose losses are divided as those
    of `full` backwards.
    """

    step: Accumulation
    full: int
    first: bool


def short_accumulation(evidence: Evidence) -> ShortAccumulation | None:
    """The first window that ends an epoch, or begins the training, has fewer backwards than the
    others, and has each loss divided by the number that the others have.

    None where the losses of full windows do not add up to their mean (sums, weights of tokens), the
    script sets the divisor of the gradients, or there are other shorter windows: they have another
    meaning (a loss of a part of the steps, batches that are skipped, a batch that grows).
    """
    survey = evidence.survey
    if survey is None or survey.all(Divide):
        return None
    for trace in survey.traces:
        windows = trace.of(Accumulation)
        full = max((one.batches for one in windows), default=1)
        short = [one for one in windows if one.batches < full]
        whole = [one for one in windows if one.batches == full and one.changed is not None]
        weights = [w for one in whole if (w := _weight(one)) is not None]
        mean = bool(weights) and all(abs(weight - 1.0) <= NEAR for weight in weights)
        # the first: an update that is made one micro-batch after the multiple (fsdp_qlora)
        edges = [*windows[:1], *_ends(trace)]
        if full < 2 or not mean or not all(one in edges for one in short):
            continue
        for one in short:
            # of the first step no gradients are compared: the script scales it as the others
            weight = _weight(
                replace(one, changed=whole[0].changed if one is windows[0] else one.changed)
            )
            if weight is not None and abs(weight * full / one.batches - 1.0) <= NEAR:
                return ShortAccumulation(one, full, first=one is windows[0])
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

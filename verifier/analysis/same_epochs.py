"""Epochs of the survey run that draw their order anew, and train on the same batches again."""

from dataclasses import dataclass
from itertools import pairwise

from ..evidence import Evidence
from ..trace import Run, Trace
from ..trace.events import Batch, Order, Sampler

EPOCHS = 2  # whole ones that must be equal


@dataclass(frozen=True)
class SameEpochs:
    """A line draws the same order `times` times; the batches after each draw are the same."""

    drawn: Order | Sampler
    batches: int  # backwards of an epoch
    times: int


@dataclass(frozen=True)
class _Drawn:
    record: Order | Sampler
    batches: int  # that the rank had trained on before it


def same_epochs(evidence: Evidence) -> SameEpochs | None:
    """The first order, by line, that comes again with the same batches in every whole epoch; None
    where there is none, or the survey has recorded no batches.
    """
    survey = evidence.survey
    if survey is None:
        return None
    for trace in survey.traces:
        for draws in _by_line(trace):
            if (found := _repeated(survey, trace, draws)) is not None:
                return found
    return None


def _by_line(trace: Trace) -> list[list[_Drawn]]:
    """What each line has drawn; of several draws between two backwards the last."""
    found: dict[tuple[object, ...], dict[int, _Drawn]] = {}
    batches = 0
    for record in trace.records:
        batches += isinstance(record, Batch)
        if isinstance(record, Order) and record.at_line is not None:
            key: tuple[object, ...] = (record.at_line.file, record.at_line.line, record.samples)
        elif isinstance(record, Sampler) and record.shuffle:
            key = (record.dataset,)
        else:
            continue
        found.setdefault(key, {})[batches] = _Drawn(record, batches)
    return [list(draws.values()) for draws in found.values()]


def _order(drawn: Order | Sampler) -> object:
    return drawn.digest if isinstance(drawn, Order) else (drawn.seed, drawn.epoch)


def _repeated(survey: Run, trace: Trace, draws: list[_Drawn]) -> SameEpochs | None:
    first, epochs = draws[0], {b.batches - a.batches for a, b in pairwise(draws)}
    # Another order in between, epochs of other lengths, or one batch alone: no epochs of one order.
    if len(epochs) != 1 or len({_order(one.record) for one in draws}) != 1:
        return None
    (length,) = epochs
    begun = [other.of(Batch)[first.batches :] for other in survey.traces]
    whole = min(map(len, begun)) // length
    last = len(trace.of(Batch)) - draws[-1].batches
    if length < 2 or last > length or whole < EPOCHS:
        return None
    # A script may cycle through a list of batches and draw something else: what was drawn must be
    # the order of these batches.
    if not all(_comes_again(own, length) for own in begun) or not _is_of(first, begun, length):
        return None
    return SameEpochs(first.record, length, whole)


def _comes_again(batches: list[Batch], length: int) -> bool:
    """Whether batches repeat with a period of `length`, and are not all the same."""
    rows = [batch.rows for batch in batches]
    return rows[length:] == rows[:-length] and any(one != rows[0] for one in rows)


def _is_of(drawn: _Drawn, begun: list[list[Batch]], length: int) -> bool:
    """Whether an order has about as many entries as an epoch has batches, steps or samples, of this
    rank or of all.
    """
    if isinstance(drawn.record, Sampler):
        return True
    epoch = [own[:length] for own in begun]
    steps = len({batch.step for batch in epoch[0]})
    sizes = [sum(batch.size for batch in own) for own in epoch]
    counts, samples = {length, steps, length * len(epoch), steps * len(epoch)}, {sizes[0]}
    samples.add(sum(sizes))
    # What does not fill the last step is left out, or filled up.
    near = len(epoch) * -(-length // steps)
    step = -(-sum(sizes) // steps)
    drawn_of = drawn.record.samples
    return any(abs(drawn_of - one) < near for one in counts) or any(
        abs(drawn_of - one) < step for one in samples
    )

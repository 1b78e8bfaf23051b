"""Later epochs of the survey run in which ranks share samples that they had apart in the first."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..evidence import Evidence
from ..tolerances import SHARED_LATER
from ..trace import Trace
from ..trace.events import Batch, LoaderStarted, Order, Sampler

Begun = LoaderStarted | Order | Sampler


@dataclass(frozen=True)
class Epoch:
    """What the ranks train on between two starts of the same loader, order or sampler."""

    begun: Begun
    ranks: tuple[Counter[int], ...]  # the samples of each rank
    batches: tuple[tuple[int, ...], ...]  # of each rank, the sizes

    @property
    def samples(self) -> Counter[int]:
        """Those of all ranks."""
        return sum(self.ranks, Counter())

    @property
    def again(self) -> int:
        """How many times ranks train on what they, or others, have trained on."""
        return self.samples.total() - len(self.samples)

    @property
    def own_again(self) -> int:
        """How many times ranks train on what they have trained on themselves."""
        return sum(own.total() - len(own) for own in self.ranks)

    @property
    def largest(self) -> int:
        """The samples of the largest global batch."""
        return sum(max(sizes, default=0) for sizes in self.batches)


@dataclass(frozen=True)
class LaterEpoch:
    """`shared` of the samples that the first epoch has once are trained on again, by other ranks,
    and `left_out` of them by none.
    """

    number: int  # from 1
    epoch: Epoch
    samples: int
    shared: int
    left_out: int


def later_epoch(evidence: Evidence) -> LaterEpoch | None:
    """The first epoch whose ranks share samples, where those of the first one shared none.

    The first epoch shows that a sample comes once: draws with replacement, and samples that are
    equal in the data, come again in it too, and what augments them, or a stream, never comes again.
    """
    for epochs in survey_epochs(evidence):
        found = [_compared(epochs[0], one, number) for number, one in enumerate(epochs, 1)]
        shared = [one for one in found[1:] if one is not None]
        if sum(one.shared for one in shared) >= SHARED_LATER:
            return shared[0]
    return None


def survey_epochs(evidence: Evidence) -> Iterator[list[Epoch]]:
    """For each loader, order or sampler of the survey run its epochs, as many as are as long as the
    first, if all their samples were recorded.
    """
    survey, train = evidence.survey, evidence.train
    if survey is None or train is None or len(survey.traces) != train.world_size:
        return
    ranks = [trace for trace in survey.traces if trace.rank in train.sample_ranks]
    starts = [_starts(trace) for trace in ranks]
    if len(ranks) < 2:
        return
    for key, first in starts[0].items():
        theirs = [one.get(key, {}) for one in starts]
        if len({len(one) for one in theirs}) > 1 or len(first) < 2:
            continue
        cuts = zip(
            *(_cut(trace, list(one)) for trace, one in zip(ranks, theirs, strict=True)), strict=True
        )
        epochs = [_epoch(begun, own) for begun, own in zip(first.values(), cuts, strict=True)]
        whole = [one for one in epochs if one is not None]
        # What is drawn for one batch is no epoch (zoo/own_update).
        if whole and epochs[0] is whole[0] and len(whole[0].batches[0]) > 1:
            yield [one for one in whole if one.batches == whole[0].batches]


def _starts(trace: Trace) -> dict[tuple[object, ...], dict[int, Begun]]:
    """{loader, line or data set: {batches before it: what began}}; of several starts between two
    batches the last.
    """
    found: dict[tuple[object, ...], dict[int, Begun]] = {}
    batches = 0
    for record in trace.records:
        batches += isinstance(record, Batch)
        if isinstance(record, Sampler):
            key: tuple[object, ...] = (record.dataset, record.samples)
        elif isinstance(record, Order | LoaderStarted) and record.at_line is not None:
            key = (type(record), record.at_line.file, record.at_line.line, record.samples)
        else:
            continue
        found.setdefault(key, {})[batches] = record
    return found


def _cut(trace: Trace, starts: list[int]) -> list[list[Batch]]:
    """The batches from each start to the next."""
    batches = trace.of(Batch)
    return [batches[a:b] for a, b in zip(starts, [*starts[1:], len(batches)], strict=True)]


def _epoch(begun: Begun, ranks: Sequence[list[Batch]]) -> Epoch | None:
    """An epoch; None where a batch has more samples than were recorded, or a rank has none."""
    if not all(ranks) or any(len(one.rows) != one.size for own in ranks for one in own):
        return None
    return Epoch(
        begun,
        tuple(Counter(row for one in own for row in one.rows) for own in ranks),
        tuple(tuple(one.size for one in own) for own in ranks),
    )


def _compared(first: Epoch, later: Epoch, number: int) -> LaterEpoch | None:
    """What a later epoch shares, if the first has its samples once and the later no others.

    Padding (less than a sample a rank) and what is left over (less than a global batch) may be
    other samples in each epoch.
    """
    had, has = first.samples, later.samples
    new = len(has.keys() - had.keys())
    shared = later.again - first.again - new
    # A rank that draws its own samples with replacement has some of them twice itself.
    once = first.again < len(first.ranks)
    if not once or new >= first.largest or later.own_again > first.own_again + new:
        return None
    if shared <= 0:
        return None
    return LaterEpoch(number, later, len(had), shared, len(had.keys() - has.keys()))

"""Which part of a loss is not that of one process: the terms of the first micro-batch, weighed by
their gradients.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..evidence import Sources
from ..tolerances import NAMED_FACTOR
from ..trace import Run
from ..trace.events import LossTerm, LossTerms, Place
from .syntax import assigned_at

Key = tuple[str, str, str, int]  # file, function, name, time
SUM, OWN_COUNT = "sum", "own count"
_SAME = 1e-3  # relative: two numbers of a run in full precision that are one, and are not noise


@dataclass(frozen=True)
class DifferingTerm:
    """The first term that makes all of the difference between a loss and that of one process.

    `kind`: SUM, where one process has the sum of the ranks' values; OWN_COUNT, where each rank
    divides a sum by a number of its own; else "".
    """

    text: str
    line: Place
    kind: str


@dataclass(frozen=True)
class _Term:
    ranks: list[LossTerm]
    single: LossTerm

    @property
    def adds_up(self) -> bool:
        return _near(math.fsum(one.value for one in self.ranks), self.single.value)

    @property
    def weighs_alike(self) -> bool:
        weights = [one.weight for one in self.ranks]
        mine = self.single.weight
        return bool(mine) and all(w is not None and _near(w, mine or 0.0) for w in weights)

    def part(self, divisor: float) -> float | None:
        """How much more of it is in the mean of the ranks' losses than in that of one process, to
        first order.
        """
        if self.single.weight is None or any(one.weight is None for one in self.ranks):
            return None
        mine = math.fsum(one.value * (one.weight or 0.0) for one in self.ranks) / divisor
        return mine - self.single.value * self.single.weight


def differing_term(run: Run, single: Run, sources: Sources) -> DifferingTerm | None:
    """The term of the first micro-batch's loss that explains why it is not that of one process;
    None where the losses agree, or no term explains it.
    """
    mine, theirs = run.micros(1), single.micros(1)
    if not mine or not all(mine) or not theirs or not theirs[0] or len(mine) != len(run.data_ranks):
        return None
    # The terms are those of the first micro-batch: it must be the same samples.
    rows = sorted(row for micros in mine for row in micros[0].rows)
    if rows != sorted(theirs[0][0].rows):
        return None
    losses, whole = [micros[0].loss for micros in mine], theirs[0][0].loss
    known = [loss for loss in losses if loss is not None]
    if whole is None or len(known) < len(losses):
        return None
    off = math.fsum(known) / run.divisor - whole
    terms = list(_terms(run, single))
    if not terms or abs(off) <= NAMED_FACTOR * abs(whole):
        return None
    explains = [
        term
        for term in terms
        if (part := term.part(run.divisor)) is not None and abs(part - off) <= 0.02 * abs(off)
    ]
    first = next((term for term in explains if term.weighs_alike), None)
    sums = [term for term in explains[: explains.index(first) if first else None] if term.adds_up]
    if sums:
        return _of_weight(sums[-1], first, sources)
    return _of_value(first, sources) if first is not None else None


def _terms(run: Run, single: Run) -> Iterator[_Term]:
    ranks = [_by_key(record) for t in run.traces if (record := t.first(LossTerms)) is not None]
    alone = single.traces[0].first(LossTerms) if single.traces else None
    if alone is None or len(ranks) < len(run.traces):
        return
    others = _by_key(alone)
    for key in ranks[0]:
        if key in others and all(key in one for one in ranks):
            yield _Term([one[key] for one in ranks], others[key])


def _by_key(record: LossTerms) -> dict[Key, LossTerm]:
    return {(t.line.file, t.line.function, t.name, t.time): t for t in record.terms}


def _of_value(term: _Term, sources: Sources) -> DifferingTerm:
    what, line = _called(term.single, sources)
    values = _few([f"{one.value:.4g}" for one in term.ranks])
    text = f"{what} is {values} on the ranks and {term.single.value:.4g} in one process"
    if term.adds_up:
        return DifferingTerm(f"{text}, their sum, where FSDP takes the mean", line, SUM)
    return DifferingTerm(f"{text}, which makes all of the difference", line, "")


def _of_weight(term: _Term, after: _Term | None, sources: Sources) -> DifferingTerm:
    """A sum that each rank divides by a number of its own; `after`: what it is then."""
    what, line = _called(term.single, sources)
    weights = _few([f"{one.weight or 0.0:.4g}" for one in term.ranks])
    where = ""
    if after is not None:
        quotient, line = _called(after.single, sources)
        where = f" in {quotient}"
    text = (
        f"{what} is divided by a count of each rank's own{where}: it weighs {weights} on the ranks"
        f" and {term.single.weight or 0.0:.4g} in one process"
    )
    return DifferingTerm(text, line, OWN_COUNT)


def _few(texts: list[str]) -> str:
    return f"{', '.join(texts[:3])}{' ...' if len(texts) > 3 else ''}"


def _called(term: LossTerm, sources: Sources) -> tuple[str, Place]:
    """How a term is called, and the line that makes it."""
    line = term.line
    place = Place(file=line.file, line=line.line, function=line.function, code=line.code)
    if not term.name:
        return f"what `{line.function.rpartition('.')[2]}` returns at line {line.line}", place
    function = line.function.rpartition(".")[2]
    lines = assigned_at(sources.tree(line.file), function, term.name)
    made = max((number for number in lines if number <= line.line), default=None)
    if made is None:
        return f"`{term.name}` (line {line.line})", place
    code = sources.line(line.file, made)
    return f"`{term.name}` (line {made})", Place(
        file=line.file, line=made, function=line.function, code=code
    )


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _SAME * max(abs(a), abs(b), 1e-12)

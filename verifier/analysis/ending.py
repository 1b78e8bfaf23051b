"""What a script prints and writes after its last step, on N ranks (the survey run) and in one
process (the ending run).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..evidence import Evidence
from ..trace import Run, Sketch, difference
from ..trace.events import Final, Place, Printed, Reached, Written
from ..trace.sketches import add
from .printed_values import lines_of_loop, without_own_values
from .state import apart
from .steps_to_compare import steps_of

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?|(?<![\w.])[-+]?(?:nan|inf)(?!\w)"
)
# Times, rates and memory differ between any two runs: lines with their units are not compared.
_OF_THE_MACHINE = re.compile(
    r"\b(s|secs?|seconds?|ms|minutes?|min|time|took|elapsed|speed|throughput|tok/s|\w+/s(ec)?|it/s|[KMG]i?B|mem(ory)?)\b",
    re.I,
)


@dataclass(frozen=True)
class Ended:
    """A value at the end, on both sides: how far apart relative to the larger, and by how much
    rounding explains.
    """

    what: str
    apart: float
    rounded: float
    line: Place | None
    shown: str

    @property
    def key(self) -> str:
        """By what it is known in every run that is compared with the same other one."""
        return self.shown or self.what


def both_end(evidence: Evidence) -> bool:
    """Whether the survey run came to the end of the script, and one process has made the same first
    steps.
    """
    survey, single = evidence.survey, evidence.single
    ended = survey is not None and survey.completed and single is not None and single.completed
    # In low precision the ends are those of another run than the compared one: they are not asked.
    return ended and evidence.full_precision is evidence.train


def comparable_end(evidence: Evidence) -> bool:
    """The same, where the script shows something at its end."""
    survey = evidence.survey
    return (
        both_end(evidence)
        and survey is not None
        and bool(survey.all(Printed) or survey.all(Written))
    )


def same_models(run: Run, other: Run) -> bool:
    """Whether the ranks of two whole runs called the same models; not where the first trains one
    into a file that others find.
    """
    last = (trace.of(Final)[-1:] for one in (run, other) for trace in one.traces)
    # If one run trains a model into a file that the next one finds, both call different models:
    # their ends are not compared (a right script judged again: one process trained a model into a
    # file that ranks found).
    return len({frozenset(final[0].weights) for final in last if final}) <= 1


def comes_to_the_same_end(evidence: Evidence) -> int:
    """The steps of a resumed run up to the end of the script, where its weights are those of the
    uninterrupted one bit by bit; else 0.
    """
    survey, resumed_ending = evidence.survey, evidence.resumed_ending
    if (
        survey is None
        or resumed_ending is None
        or not (survey.completed and resumed_ending.completed)
    ):
        return 0
    ends = [
        [event.weights for event in run.all(Reached) if event.ended]
        for run in (survey, resumed_ending)
    ]
    made = steps_of(resumed_ending)
    same = ends[0] == ends[1] and len(ends[0]) == survey.world_size and all(ends[0])
    # A resume that makes as many steps as the whole training began again: equal ends then prove
    # nothing of the resume.
    return made if same and made < steps_of(survey) else 0


def weights_apart(evidence: Evidence, other: Run | None) -> float:
    """How far the last weights are from those that another whole run ends with, relative to the
    length of those that were trained.

    `other`: in one process, or resumed on other ranks. Infinite where the distance is not known.
    """
    survey = evidence.survey
    if survey is None or other is None or not (survey.completed and other.completed):
        return math.inf
    mine, theirs = _final(survey), _final(other)
    size = math.fsum(value[0] for name, value in theirs.items() if changes_later(evidence, name))
    # Without the same names on both sides, or without a trained parameter, the distance of the ends
    # is not known.
    if not mine or mine.keys() != theirs.keys() or not 0.0 < size < math.inf:
        return math.inf
    return math.sqrt(
        math.fsum(difference(mine[name], value) ** 2 for name, value in theirs.items()) / size
    )


def resharded_to_the_same_end(evidence: Evidence) -> float:
    """The largest such distance over the resumes on other ranks that were judged, each run to the
    end; infinite where one is not known.
    """
    ends = {run.world_size: run for run in evidence.resharded_endings}
    survey, sizes = evidence.survey, {run.world_size for run in evidence.reshards}
    if survey is None or not sizes or not sizes <= ends.keys():
        return math.inf
    # The same on other ranks: a start from scratch comes to the same end without having loaded
    # anything.
    begun_again = any(not 0 < steps_of(ends[size]) < steps_of(survey) for size in sizes)
    return math.inf if begun_again else max(weights_apart(evidence, ends[size]) for size in sizes)


def _final(run: Run) -> dict[str, Sketch]:
    """{parameter: its whole last value} of a run; {} unless every rank has recorded its part."""
    found: dict[str, Sketch] = {}
    ends = [trace.of(Final)[-1:] for trace in run.traces]
    for trace, last in zip(run.traces, ends, strict=True):
        for name, value in last[0].weights.items() if last else ():
            if run.copy(name, trace.rank) == 0:
                found[name] = add(found.get(name), value)
    return found if all(ends) else {}


def changes_later(evidence: Evidence, name: str) -> bool:
    """Whether a parameter or buffer has other values at the end of the script than at its first
    step, on some rank.
    """
    survey = evidence.survey
    if survey is None or not survey.completed:
        return False
    ends = [event for event in survey.all(Reached) if event.ended and event.weights]
    relative = re.sub(r"^model\d*\.", "", name)
    # A parameter that later phases train is not one that never changes (phases, thawed layers).
    return bool(ends) and any(relative not in event.still for event in ends)


def last_step(evidence: Evidence) -> int:
    """The number of optimizer steps that the survey run has made, of all its optimizers."""
    survey = evidence.survey
    return (
        max([0, *(r.steps for r in survey.all(Printed)), *(r.steps for r in survey.all(Written))])
        if survey
        else 0
    )


def ended(evidence: Evidence, run: Run, other: Run) -> Iterator[Ended]:
    """The numbers and tensors that both runs show at their end, with how far apart they are.

    `run`: the survey, or one that is like it.
    """
    survey, sources = evidence.survey or run, evidence.sources
    loop = lines_of_loop(survey, sources)
    mine, theirs = _by_place(run), _by_place(other)
    for key, records in mine.items():
        others = theirs.get(key, [])
        if len(others) == len(records) and not any(
            line in loop.get(file, ()) for file, line in key
        ):
            for one, again in zip(records, others, strict=True):
                texts = [
                    without_own_values(r.text, _places(one), loop, evidence.trained, sources)
                    for r in (one, again)
                ]
                if texts[0] is not None and texts[1] is not None:
                    yield from _numbers(texts[0], texts[1], one, again)
    files = {record.path: record.values for record in other.all(Written)}
    for file in run.all(Written):
        known = files.get(file.path, {})
        for name in sorted(file.values.keys() & known.keys()):
            if file.values[name].numel == known[name].numel:
                what = f"`{name}` in {file.path}" if name else file.path
                yield Ended(what, apart(file.values[name], known[name]), 0.0, None, "")


def _places(record: Printed) -> list[Place]:
    return [*([record.at_line] if record.at_line is not None else []), *record.stack]


def _by_place(run: Run) -> dict[tuple[tuple[str, int], ...], list[Printed]]:
    found: dict[tuple[tuple[str, int], ...], list[Printed]] = {}
    for record in run.all(Printed):
        found.setdefault(tuple((place.file, place.line) for place in _places(record)), []).append(
            record
        )
    return found


def _numbers(text: str, again: str, one: Printed, other: Printed) -> Iterator[Ended]:
    if _NUMBER.sub("#", text) != _NUMBER.sub("#", again) or _OF_THE_MACHINE.search(
        _NUMBER.sub("#", text)
    ):
        return
    for a, b in zip(_NUMBER.findall(text), _NUMBER.findall(again), strict=True):
        # Whole numbers are counts of ranks, steps or files, which differ in one process by right.
        if not re.search(r"[.en]", a + b):
            continue  # counts of ranks, steps and files
        x, y = float(a), float(b)
        away = rounded = 0.0
        if a != b:
            finite = math.isfinite(x) and math.isfinite(y)
            size = max(abs(x), abs(y)) or 1.0
            away = abs(x - y) / size if finite else math.inf
            # Half a unit in the last printed place of each side: what `print` itself rounds.
            rounded = (_unit(a) + _unit(b)) / 2 / size if finite else 0.0
        yield Ended(f"`{one.text.strip()}`", away, rounded, one.at_line, f"`{other.text.strip()}`")


def _unit(number: str) -> float:
    """One unit in the last printed place."""
    digits, _, exponent = number.lower().partition("e")
    return float(f"1e{int(exponent or 0) - len(digits.partition('.')[2])}")

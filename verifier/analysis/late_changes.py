"""Which steps behind the compared ones are worth comparing: those at which something changes."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from ..config.windows import Window
from ..evidence import Evidence
from ..tolerances import AFTER_A_CHANGE, LONGEST_WINDOW
from ..trace import Trace
from ..trace.events import Batch
from .not_covered import unreached
from .steps_to_compare import steps_of
from .wording import count


def windows(evidence: Evidence) -> list[Window]:
    """The windows that the survey run suggests, in the order of their steps; [] where nothing is
    left to compare, or no run came that far.
    """
    survey, train = evidence.survey, evidence.train
    if survey is None or train is None or not survey.traces:
        return []
    compared, made = train.steps(), steps_of(survey)
    if made <= compared:
        return []
    changes = [*_late_code(evidence), *_other_batches(survey.traces[0], compared)]
    changes += list(_next_epoch(survey.traces[0], compared))
    if survey.completed:
        changes.append((made - AFTER_A_CHANGE, "the last steps"))
    found = [
        Window(max(step, compared + 1), min(step + AFTER_A_CHANGE, made), reason)
        for step, reason in changes
        if step <= made
    ]
    return _together(sorted(found, key=lambda one: (one.first, one.last)))


def seconds_of(evidence: Evidence, window: Window) -> float:
    """What the runs of a window take, about: the script, DDP and one process, each from its first
    step on. Two of them have a lighter probe than the survey run, by whose time this is estimated.
    """
    survey = evidence.survey
    if survey is None:
        return 0.0
    return 2 * survey.seconds * window.last / max(steps_of(survey), 1)


def _late_code(evidence: Evidence) -> Iterator[tuple[int, str]]:
    """What is reached first behind the compared steps: (step, reason)."""
    for one in unreached(evidence):
        if one.step is not None:
            file = one.file.rpartition("/")[2]
            yield one.step + 1, f"{file}:{one.block.first} is reached first"


def _other_batches(trace: Trace, compared: int) -> Iterator[tuple[int, str]]:
    """The first step with a number of backwards or samples that no compared step has."""
    sizes = {
        step: [batch.size for batch in batches]
        for step, batches in groupby(trace.of(Batch), key=lambda batch: batch.step)
    }
    known = [own for step, own in sizes.items() if step <= compared]
    for step, own in sizes.items():
        if step > compared and own not in known:
            yield step, f"{count(len(own), 'backward')} on {count(sum(own), 'sample')}"
            return


def _next_epoch(trace: Trace, compared: int) -> Iterator[tuple[int, str]]:
    """The first step that trains on a sample again, if it is behind the compared ones."""
    seen: set[int] = set()
    step = 0
    for batch in trace.of(Batch):
        if batch.step != step:
            step, before = batch.step, frozenset(seen)
        if not before.isdisjoint(batch.rows):
            if step > compared:
                yield step, "samples come again"
            return
        seen.update(batch.rows)


def _together(found: Sequence[Window]) -> list[Window]:
    """Windows that overlap or follow one another as one, as long as that is short."""
    joined: list[Window] = []
    for one in found:
        last = joined[-1] if joined else None
        end = max(one.last, last.last) if last is not None else 0
        if last is None or one.first > last.last + 1 or end - last.first >= LONGEST_WINDOW:
            joined.append(one)
            continue
        reasons = dict.fromkeys([*last.reason.split("; "), one.reason])
        joined[-1] = Window(last.first, end, "; ".join(reasons))
    return joined

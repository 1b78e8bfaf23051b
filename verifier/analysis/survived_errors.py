"""Errors that the script caught within its training loop, and after which it trained on."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..evidence import Sources
from ..trace import Run, Trace
from ..trace.events import Reached
from .swallowed_errors import Caught, errors_of, is_designed
from .wording import some


@dataclass(frozen=True)
class Survived:
    """An error in step `step` (from 1 on), caught at line `line` of `file`; `text`: which ranks
    raised it, and where.
    """

    step: int
    file: str
    line: int
    text: str


def survived(run: Run | None, sources: Sources) -> list[Survived]:
    """The first error of each line and handler, in the order of the steps."""
    found: dict[tuple[str, int, int], list[tuple[int, Caught]]] = {}
    for trace in run.traces if run is not None else ():
        for error in _of(trace, sources):
            handler = error.handler
            if handler is not None:
                key = (error.place.file, handler.line, error.first.frames[0].line)
                found.setdefault(key, []).append((trace.rank, error))
    firsts = [_first(errors) for errors in found.values()]
    return sorted(firsts, key=lambda one: one.step)


def _of(trace: Trace, sources: Sources) -> Iterator[Caught]:
    made = [record.seq for record in trace.of(Reached) if not record.ended]
    for error in errors_of(trace, sources):
        inside = error.first.training and error.last.seq < max(made, default=-1)
        if inside and not error.asks and not is_designed(error, sources):
            yield error


def _first(errors: list[tuple[int, Caught]]) -> Survived:
    """The first of the errors that one handler caught, by rank."""
    step = min(error.first.steps for _, error in errors) + 1
    ranks = sorted({rank for rank, error in errors if error.first.steps + 1 == step})
    _, error = min(errors, key=lambda pair: pair[1].first.steps)
    handler = error.handler
    assert handler is not None
    who = f"rank{'s' * (len(ranks) > 1)} {some(map(str, ranks))}"
    return Survived(step, error.place.file, handler.line, f"{who}: {error.said()}")

"""What of the project the runs have reached, and after how many steps first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar

from ..evidence import Evidence, Sources
from ..source.expression_sides import Span
from ..source.unreached_blocks import Block, blocks
from ..trace import Run
from ..trace.events import Reached, Visited

Key = TypeVar("Key", int, Span)


@dataclass
class Seen:
    """By file: {line, or what was evaluated of a conditional expression: the steps that were made
    before it was first reached by any rank}.
    """

    lines: dict[str, dict[int, int]] = field(default_factory=dict)
    sides: dict[str, dict[Span, int]] = field(default_factory=dict)

    @classmethod
    def by(cls, survey: Run) -> Self:
        """What the survey run has reached.

        Steps count from the last first step on: those before it are of other models.
        """
        seen = cls()
        for trace in survey.traces:
            events = trace.of(Reached)
            begins = [number for number, event in enumerate(events) if event.stack]
            first = max(begins, default=len(events))
            made = 0
            for number, event in enumerate(events):
                if number > first:
                    # A report comes with each step that reaches something new, and not with each
                    # other one: what it says is new was reached in the step before it.
                    made = max(made, event.steps - (not event.ended))
                seen._add(event.lines, event.sides, made)
                made = event.steps if number > first else 0
        return seen

    @classmethod
    def of(cls, evidence: Evidence) -> Self:
        """What the survey, the train run and the resume have reached."""
        seen = cls.by(evidence.survey) if evidence.survey is not None else cls()
        for run in (evidence.train, evidence.resume):
            seen.also(run)
        return seen

    def also(self, run: Run | None) -> None:
        """What another run has reached of the lines that it was asked for."""
        for event in run.all(Visited) if run is not None else ():
            self._add(event.lines, event.sides, 0)

    def _add(
        self,
        lines: Mapping[str, Sequence[int]],
        sides: Mapping[str, Sequence[Sequence[int]]],
        made: int,
    ) -> None:
        for file, new in lines.items():
            _earliest(self.lines.setdefault(file, {}), new, made)
        for file, spans in sides.items():
            found = self.sides.setdefault(file, {})
            _earliest(found, [(a, b, c, d) for a, b, c, d in spans], made)


def _earliest(known: dict[Key, int], new: Iterable[Key], made: int) -> None:
    known |= {key: min(known.get(key, made), made) for key in new}


def first_times(seen: Seen, sources: Sources) -> Iterator[tuple[str, Block, int | None]]:
    """(file, block, after how many steps a rank has first reached it; None: never) of the
    branches, loops and what lies behind them, in functions that were entered.
    """
    for file in sources.project:
        lines = seen.lines.get(file, {})
        for block, there in blocks(sources.tree(file), lines):
            inside = [step for line, step in lines.items() if block.first <= line <= block.last]
            yield file, block, min(inside) if there and inside else None

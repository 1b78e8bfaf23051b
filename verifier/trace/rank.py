"""What one rank recorded in a run, and how its process ended."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from . import events
from .beside import beside, changed_beside, others_go_on
from .events import Event, Step, Stepped

E = TypeVar("E", bound=Event)
S = TypeVar("S", Step, Stepped)


@dataclass(frozen=True)
class Trace:
    """The events of one rank in one run, in order."""

    rank: int
    records: tuple[Event, ...]

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [r for r in self.records if isinstance(r, kind)]

    def first(self, kind: type[E]) -> E | None:
        """The first event of a kind, or None."""
        return next(iter(self.of(kind)), None)

    @cached_property
    def first_optimizer(self) -> int | None:
        """The number of the optimizer that steps first: its steps are the steps of the run."""
        return next((r.optimizer for r in self.of(Step)), None)

    @cached_property
    def steps(self) -> list[Step]:
        """The records of its steps, each merged with those of the other optimizers in the same
        step.
        """
        return [beside(record, others) for record, others in self._with_others(Step)]

    @cached_property
    def stepped(self) -> list[Stepped]:
        """The records of what its steps changed, each merged with what the other optimizers changed
        of their own parameters.
        """
        held = {r.optimizer: r.held for r in self.of(Step)}
        return [
            changed_beside(record, others, held) for record, others in self._with_others(Stepped)
        ]

    def _with_others(self, kind: type[S]) -> list[tuple[S, list[S]]]:
        """(record of the first optimizer, those of the others between it and its next one) of a
        kind.

        The first optimizer steps first, so another's step of the same iteration comes after it.
        """
        records = self.of(kind)
        main: list[S] = [r for r in records if r.optimizer == self.first_optimizer]
        # The first optimizer steps first: another's step up to its next one belongs to the same
        # iteration (GANs (zoo/two_optimizers)).
        marks = [*(float(r.seq) for r in main[1:]), math.inf]
        spans = list(zip(main, marks, strict=False))[: -1 if others_go_on(self.of(Step)) else None]
        return [
            (one, [r for r in records if r is not one and one.seq < r.seq < end])
            for one, end in spans
        ]

    def cleared(self, step: int) -> int:
        """The number of the last record by which gradients of a step were cleared before it; -1 if
        there is none.
        """
        edits = [
            r.seq
            for r in self.of(events.EditedGradients)
            # Gradients that are multiplied by 0 are cleared as by zero_grad: SAM's first pass is no
            # part of the step (SAM (exam r1 a_12, b_14, c_11; r4 k_14)).
            if r.step == step and set(r.factors.values()) == {0.0}
        ]
        return max(
            [*edits, *(r.seq for r in self.of(events.Cleared) if r.step == step)], default=-1
        )

    @property
    def end(self) -> events.End | None:
        """How the script ended on this rank; None if the rank exited without recording it."""
        return self.first(events.End)


@dataclass(frozen=True)
class Ended:
    """The exit of one rank's process: `code` as in subprocess (negative: signal); `killed`: by the
    launcher.

    `lost`: the machine that stopped answering, and the rank with it.
    """

    rank: int
    code: int
    killed: bool
    at: float = math.inf  # on the clock of the records
    lost: str = ""

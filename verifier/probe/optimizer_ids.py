"""The optimizers of one rank: which number each has, and how many steps it has begun."""

import gc
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer


@dataclass
class Turn:
    """The steps of one optimizer, or of several that take turns in one training."""

    owners: list[weakref.ref[Any]]
    number: int
    late: bool  # constructed when others had stepped
    begun: int = 0
    place: Hashable = None  # of its last step


class Turns:
    """The optimizers of one rank.

    In a training of phases or stages the next optimizer goes on with the count of the last one.

    It takes the place of one that has been deleted, or steps at the same lines, after backwards of
    its own.
    """

    def __init__(self, in_phases: bool = False) -> None:
        self._known: list[Turn] = []
        # An optimizer that made a single step may be a partner (a GAN); in a resume of phases it
        # may be the rest of a phase (GANs (zoo/two_optimizers); exam round 12 for 1).
        self._least = 1 if in_phases else 2  # steps of one that another follows
        self.of_torch = False  # whether one of torch's was constructed

    def __bool__(self) -> bool:
        return bool(self._known)

    def add(self, optimizer: object) -> Turn:
        """A new optimizer, which has made no step."""
        number = 1 + max((turn.number for turn in self._known), default=-1)
        turn = Turn([weakref.ref(optimizer)], number, late=self.begun > 0)
        self._known.append(turn)
        self.of_torch |= isinstance(optimizer, Optimizer)
        return turn

    def of(self, optimizer: object) -> Turn:
        """The number and count of an optimizer; also of one whose construction was not seen."""
        known = (turn for turn in self._known if any(owner() is optimizer for owner in turn.owners))
        return next(known, None) or self.add(optimizer)

    def at_step(self, optimizer: object, place: Hashable = None, trained: bool = False) -> Turn:
        """The same for an optimizer that is about to step, whose `begun` the caller then raises.

        `place`: the lines of the step; `trained`: whether a backward has run since the last step.
        """
        turn = self.of(optimizer)
        if (
            not turn.begun
            and (before := self._predecessor(turn, place if trained else None)) is not None
        ):
            self._known.remove(turn)
            before.owners += turn.owners
            turn = before
        turn.place = place
        return turn

    def _predecessor(self, turn: Turn, place: Hashable) -> Turn | None:
        """Whose count an optimizer goes on with at its first step.

        One that has made a single step may be its partner (a GAN).
        """
        same = (
            other
            for other in self._known
            # Optimizers that step at the same lines one after the other are phases of one training
            # (exam r5 q_19_distill_growing_batch: two optimizers, both alive).
            if place is not None and other.place == place and other.begun >= self._least
        )
        if turn.late:
            # A scheduler and its optimizer refer to each other: only the collector shows that the
            # last phase's optimizer is gone (exam r4 l_14_progressive_distill,
            # n_15_stage_boosting).
            gc.collect()  # a learning-rate scheduler ties an optimizer to itself
            gone = [
                other
                for other in self._known
                if other.begun and not any(owner() for owner in other.owners)
            ]
            return min(gone, key=lambda other: other.number, default=None) or next(same, None)
        return next(same, None)

    @property
    def begun(self) -> int:
        """The steps begun by the optimizer that has begun most."""
        return max((turn.begun for turn in self._known), default=0)

    def alive(self) -> list[Optimizer]:
        """The optimizers of torch that have not been deleted."""
        owners = [owner() for turn in self._known for owner in turn.owners]
        return [owner for owner in owners if isinstance(owner, Optimizer)]

"""What the finders of `migrate` ask of a script: the wrappers, the models and the optimizers in one
flow of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

from .events import Event, Flow
from .values import Value, choices, reach

FSDP1 = "fsdp.FullyShardedDataParallel"
DDP = ("torch.nn.parallel.DistributedDataParallel", "apex.parallel.DistributedDataParallel")
DATA_PARALLEL = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
WRAPPERS = (FSDP1, *DDP, *DATA_PARALLEL)
MODULE = "(.module)"  # `.module` of a wrapper is read

Values = dict[str, str]
# A row of migration.json, its event, and the values of its $names; "line" is that of an argument.
Seen = tuple[str, Event, Values]
Found = Iterator[Seen]
Table = dict[str, tuple[str, ...]]  # a row: the external functions whose every call is one


def rows(row: str, events: Iterable[Event]) -> Found:
    """One row for each of the events."""
    return ((row, event, {}) for event in events)


class Scene:
    """One flow of a script of some kind, and what the finders ask of it."""

    def __init__(self, flow: Flow, kind: str) -> None:
        self.flow, self.kind = flow, kind
        self.alone = kind in ("single", "dataparallel")  # one process
        self.wraps = flow.ops(*WRAPPERS)
        wrapped = [module for event in self.wraps if (module := event.arg(0, "module")) is not None]
        self.models = [model for given in wrapped for model in choices(given)] + list(
            flow.trained.values()
        )
        self.optimizers = {id(event.result) for event, _ in flow.optimizers}

    @cached_property
    def anchor(self) -> list[Event]:
        """Where the model is ready to be sharded: its wrapper, or else the construction of the
        first optimizer.
        """
        return self.wraps[:1] or [event for event, _ in self.flow.optimizers[:1]]

    def called(self, table: Table) -> Found:
        """The rows of a table that occur."""
        for row, names in table.items():
            yield from rows(row, self.flow.ops(*names))

    def wrapper(self, value: Value | None) -> bool:
        """Whether a value is, or may be, a model in its wrapper."""
        return value is not None and any(
            one.kind == "made" and one.name in WRAPPERS for one in choices(value)
        )

    def inside(self, value: Value | None) -> bool:
        """Whether a value is `.module` of a wrapper."""
        return value is not None and any(
            one.kind == "item" and one.name == MODULE for one in choices(value)
        )

    def model(self, value: Value | None) -> bool:
        """Whether a value is a model that is trained, in its wrapper or not."""
        known = value is not None and any(
            one is model for one in choices(value) for model in self.models
        )
        return known or self.wrapper(value) or self.inside(value)

    def optimizer(self, value: Value | None) -> bool:
        """Whether a value is an optimizer."""
        return value is not None and any(id(one) in self.optimizers for one in choices(value))

    def held(self, value: Value) -> set[str]:
        """What of a training a value holds: "model", "optimizer", "unknown" where no visible code
        makes it.
        """
        found = set()
        for part in reach(value):
            made = part.event if part.kind == "made" and part.name == "state_dict" else None
            for one in [part, *([made.on] if made is not None else [])]:
                found |= (
                    {"model"}
                    if self.model(one)
                    else {"optimizer"}
                    if self.optimizer(one)
                    else set()
                )
            found |= {"unknown"} if part.kind in ("free", "unknown") else set()
        return found

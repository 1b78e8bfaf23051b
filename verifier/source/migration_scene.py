"""What the finders of `migrate` ask of a script: the wrappers, the models and the optimizers in one flow of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from .events import Event, Flow
from .values import Value, choices, reach

FSDP1 = "fsdp.FullyShardedDataParallel"
DDP = ("torch.nn.parallel.DistributedDataParallel", "apex.parallel.DistributedDataParallel")
DATA_PARALLEL = ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel")
WRAPPERS = (FSDP1, *DDP, *DATA_PARALLEL)
MODULE = "(.module)"  # `.module` of a wrapper is read

Values = dict[str, str]
Seen = tuple[
    str, Event, Values
]  # a row of migration.json, where, and what stands for its $names; "line": of an argument
Found = Iterator[Seen]
Finder = Callable[["Scene"], Found]


class Scene:
    """One flow of a script of some kind, and what the finders ask of it."""

    def __init__(self, flow: Flow, kind: str) -> None:
        self.flow, self.kind = flow, kind
        self.alone = kind in ("single", "dataparallel")  # one process
        self.wraps = flow.ops(*WRAPPERS)
        wrapped = [module for event in self.wraps if (module := event.arg(0, "module")) is not None]
        self.models = [model for given in wrapped for model in choices(given)] + list(flow.trained.values())
        self.optimizers = {id(event.result) for event, _ in flow.optimizers}

    @cached_property
    def anchor(self) -> list[Event]:
        """Where the model is ready to be sharded: its wrapper, or else the construction of the first optimizer."""
        return self.wraps[:1] or [event for event, _ in self.flow.optimizers[:1]]

    def wrapper(self, value: Value | None) -> bool:
        """Whether a value is, or may be, a model in its wrapper."""
        return value is not None and any(one.kind == "made" and one.name in WRAPPERS for one in choices(value))

    def inside(self, value: Value | None) -> bool:
        """Whether a value is `.module` of a wrapper."""
        if value is None:
            return False
        return any(one.kind == "item" and one.name == MODULE for one in choices(value))

    def model(self, value: Value | None) -> bool:
        """Whether a value is a model that is trained, in its wrapper or not."""
        if value is None:
            return False
        known = any(one is model for one in choices(value) for model in self.models)
        return known or self.wrapper(value) or self.inside(value)

    def optimizer(self, value: Value | None) -> bool:
        """Whether a value is an optimizer."""
        return value is not None and any(id(one) in self.optimizers for one in choices(value))

    def held(self, value: Value) -> set[str]:
        """What of a training a value holds: "model", "optimizer", "unknown" where nobody in sight makes it."""
        found = set()
        for part in reach(value):
            made = part.event if part.kind == "made" and part.name == "state_dict" else None
            for one in [part, *([made.on] if made is not None else [])]:
                found |= {"model"} if self.model(one) else {"optimizer"} if self.optimizer(one) else set()
            found |= {"unknown"} if part.kind in ("free", "unknown") else set()
        return found

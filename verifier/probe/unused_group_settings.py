"""Settings of parameter groups that an optimizer does not read in its steps.

Looked for only where a group holds a number under a name that is a setting of an optimizer of torch
and none that this optimizer declares in its defaults: then its groups are replaced, while it steps,
by dicts that record which names are read.
"""

import inspect
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from ..trace.events import UnreadSettings
from .measures import class_name
from .session import Session


class _Recording(dict[str, Any]):
    """A parameter group that knows which of its names were read.

    With an `__iter__` of its own, `**group` reads each of them.
    """

    def __init__(self, own: dict[str, Any], read: set[str]) -> None:
        super().__init__(own)
        self.own = own
        self.read = read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*super().keys()])

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.read.add(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().setdefault(name, default)

    def items(self) -> Any:
        self.read.update(self)
        return super().items()

    def values(self) -> Any:
        self.read.update(self)
        return super().values()

    def given_back(self) -> dict[str, Any]:
        """The optimizer's own group, with what the step has set in this one."""
        settings = dict(super().items())
        self.own.clear()
        self.own.update(settings)
        return self.own


class Unread:
    """The names that each optimizer with a suspicious setting has read so far."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.read: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()

    def stepping(self, optimizer: Optimizer, closure: bool) -> None:
        """An optimizer is about to step. One within another's step may have the groups of that."""
        groups = optimizer.param_groups
        if not any(isinstance(g, _Recording) for g in groups) and any(
            foreign(optimizer, group) for group in groups
        ):
            read = self.read.setdefault(optimizer, set())
            groups[:] = [_Recording(group, read) for group in groups]

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped: its own groups come back."""
        read, groups = self.read.get(optimizer), optimizer.param_groups
        if not any(isinstance(group, _Recording) and group.read is read for group in groups):
            return
        names = sorted(read or ())
        groups[:] = [
            g.given_back() if isinstance(g, _Recording) and g.read is read else g for g in groups
        ]
        found = {
            k: repr(v)
            for group in groups
            for k, v in foreign(optimizer, group).items()
            if k not in names
        }
        turn = self.session.progress.optimizers.of(optimizer)
        names = [name for name in names if name != "params"]
        self.session.write(
            UnreadSettings(
                optimizer=turn.number,
                cls=class_name(optimizer),
                step=turn.begun,
                unread=found,
                read=names,
            )
        )


def foreign(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group that have the name of one of torch's, are not among the optimizer's
    defaults, and say what no other says.
    """
    given = {
        # Only names of torch's own settings that this optimizer does not declare: any other key may
        # be a note of the script (dion's second review (fields); betas of a Muon that reads beta1
        # and beta2).
        k: v
        for k, v in group.items()
        if k in settings_of_torch() and k not in optimizer.defaults
    }
    said = {number for k, v in group.items() if k not in given for number in _numbers(v)}
    # A setting whose numbers stand under another name too (beta1, beta2) is said twice, not lost;
    # zeros set nothing.
    return {k: v for k, v in given.items() if any(_numbers(v)) and not {*_numbers(v)} <= said}


@cache
def settings_of_torch() -> frozenset[str]:
    """The names of numbers, and of pairs of numbers, that the optimizers of torch take."""
    made = [
        cls
        for cls in vars(torch.optim).values()
        if isinstance(cls, type) and issubclass(cls, Optimizer)
    ]
    parameters = [p for cls in made for p in inspect.signature(cls.__init__).parameters.values()]
    # `lr` is read by schedulers outside of the step: that the step does not read it proves nothing.
    return frozenset(p.name for p in parameters if _numbers(p.default)) - {"lr"}


def _numbers(value: object) -> tuple[float, ...]:
    """A number, or the numbers of a tuple or list; none for anything else."""
    values = value if isinstance(value, tuple | list) else (value,)
    plain = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    return tuple(float(v) for v in values) if plain else ()


def install(session: Session) -> None:
    """Subscribe to the steps of optimizers."""
    unread = session.one(Unread)
    session.subscribe("stepping", unread.stepping)
    session.subscribe("stepped", unread.stepped)

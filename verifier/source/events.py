"""What a followed script does, in order: calls, stores and iterations, each with the conditions
under which it happens.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from ..finding import Hit
from ..trace.events import Place
from .coverage import Missed
from .project import Module, Project
from .values import GLOBAL, Value, choices, holders, reach, root_of, spread

SHARD = "fsdp.fully_shard"
CALL = "(call)"  # an instance or an unknown value is called: a module's forward
NEW = "(new)"  # an object of a project class is made
STORE = "(store)"  # `on.method = args[0]`
ITERATE = "(iterate)"


class Guard(NamedTuple):
    """`test` held (`branch` True) or did not hold."""

    node: ast.AST
    test: Value
    branch: bool


class Event:
    """One call or store.

    `op` is the canonical name of an external function, one of the constants above, or "" for a
    method.
    """

    __slots__ = (
        *(
            "index",
            "op",
            "node",
            "module",
            "function",
            "method",
            "on",
            "args",
            "kwargs",
            "open",
            "forked",
        ),
        *("guards", "loops", "withs", "caught", "discarded", "_result"),
    )

    def __init__(
        self,
        index: int,
        op: str,
        node: ast.AST,
        module: Module,
        function: str,
        method: str = "",
        on: Value | None = None,
        args: list[Value] | None = None,
        guards: tuple[Guard, ...] = (),
        loops: tuple[ast.AST, ...] = (),
        withs: tuple[Value, ...] = (),
        caught: bool = False,
    ) -> None:
        self.index, self.op, self.node, self.module, self.function = (
            index,
            op,
            node,
            module,
            function,
        )
        self.method, self.on, self.args = method, on, args or []
        self.guards, self.loops, self.withs, self.caught = guards, loops, withs, caught
        self.kwargs: dict[str, Value] = {}
        self.open = False  # there may be more arguments than are known
        self.forked = False  # the called value has several candidates
        self.discarded = False
        self._result: Value | None = None

    @property
    def result(self) -> Value:
        """What it gives."""
        if self._result is None:
            self._result = Value("unknown")
        return self._result

    @result.setter
    def result(self, value: Value) -> None:
        self._result = value

    def arg(self, position: int, name: str) -> Value | None:
        """An argument by position or name; None if it is not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else None

    def given(self) -> Iterator[Value]:
        """All arguments."""
        yield from self.args
        yield from self.kwargs.values()

    @property
    def given_rank(self) -> bool:
        """Whether an argument depends on the rank."""
        return spread(self.args)[0] > 0 or spread(self.kwargs.values())[0] > 0

    @property
    def line(self) -> int:
        """Where it stands."""
        return getattr(self.node, "lineno", 1)

    @property
    def on_some_ranks(self) -> Guard | None:
        """The condition that only some ranks of the world meet, if there is one."""
        return next(
            (g for g in self.guards if g.test.rank == GLOBAL and not _asks_world(g.node)), None
        )


@lru_cache(maxsize=4096)
def _asks_world(node: ast.AST) -> bool:
    """Whether a condition also asks how many ranks there are, or whether there are any."""
    test = getattr(node, "test", node)
    names = (getattr(n, "id", None) or getattr(n, "attr", None) or "" for n in ast.walk(test))
    return any(
        "world" in name.lower() or name in ("is_initialized", "num_processes") for name in names
    )


def covers(first: Event, second: Event) -> bool:
    """Whether `first` has happened whenever `second` happens."""
    if first.index >= second.index:
        return False
    held = {(id(g.node), g.branch) for g in second.guards}
    return all((id(g.node), g.branch) in held for g in first.guards)


def exclusive(one: Event, other: Event) -> bool:
    """Whether the two stand in opposite branches."""
    held = {(key, not branch) for key, branch in map(_side, other.guards)}
    return any(_side(g) in held for g in one.guards)


def _side(guard: Guard) -> tuple[object, bool]:
    """A condition without its `not`, and whether that holds: two `if` on one value have the same
    condition. So have `rank == 0` and `rank != 0`.
    """
    test, branch = guard.test, guard.branch
    while test.kind == "derived" and test.name == "Not":
        test, branch = test.parts[0], not branch
    if test.kind == "derived" and test.name in ("Eq", "NotEq"):
        sides = tuple(
            ("const", one.const) if one.kind == "const" else id(one) for one in test.parts
        )
        return sides, branch == (test.name == "Eq")
    return id(test if test.kind != "const" else guard.node), branch


class Flow:
    """All events of one entry: a script from its first line (`whole`), or a function that no
    visible code calls.
    """

    def __init__(self, project: Project, whole: bool) -> None:
        self.project, self.whole = project, whole
        self.events: list[Event] = []
        self.partial = False  # too long, or nested too deeply, to be followed completely
        # functions that were entered, and calls that are understood
        self.followed: set[ast.AST] = set()
        self.missed: dict[ast.AST, Missed] = {}  # calls that could not be followed
        # where a rank goes into anything but a condition or an output
        self.rank_uses: list[ast.AST] = []
        self.by_op: dict[str, list[Event]] = {}
        self.by_method: dict[str, list[Event]] = {}
        self.is_module: Callable[[Value], bool] = lambda value: False
        self.external_bases: Callable[[Any], list[str]] = lambda info: []

    def add(self, event: Event) -> None:
        """Append an event."""
        self.events.append(event)
        if event.op:
            self.by_op.setdefault(event.op, []).append(event)
        if event.method:
            self.by_method.setdefault(event.method, []).append(event)

    def ops(self, *names: str) -> list[Event]:
        """The calls of external functions of these names, in order."""
        found = [event for name in names for event in self.by_op.get(name, ())]
        return sorted(found, key=lambda e: e.index) if len(names) > 1 else found

    def methods(self, *names: str) -> list[Event]:
        """The calls of methods of these names, in order."""
        found = [e for name in names for e in self.by_method.get(name, ()) if e.op != STORE]
        return sorted(found, key=lambda e: e.index) if len(names) > 1 else found

    def matching(self, test: Callable[[str], bool]) -> list[Event]:
        """The calls of external functions whose name meets a test."""
        return self.ops(*(name for name in self.by_op if test(name)))

    @property
    def distributed(self) -> bool:
        """Whether anything of torch's distributed packages is called, or a name that comes from
        them.
        """
        return any(is_distributed(name, "") for name in self.by_op) or any(
            m in self.by_method for m in _METHODS
        )

    @property
    def training(self) -> bool:
        """Whether a part of a training is in it: sharding, a backward pass, an optimizer or a
        checkpoint.
        """
        parts = any(name.startswith(_TRAINING) for name in self.by_op)
        return parts or "backward" in self.by_method or bool(self.optimizers)

    @property
    def certain(self) -> bool:
        """Whether what was not seen does not happen."""
        return self.whole and not self.partial

    @cached_property
    def shards(self) -> list[tuple[Event, Value]]:
        """(call of fully_shard, one module that it shards)."""
        given = [
            (event, module)
            for event in self.ops(SHARD)
            if (module := event.arg(0, "module")) is not None
        ]
        targets = [
            (event, one)
            for event, m in given
            for one in (m.parts if m.kind in ("list", "tuple") else [m])
        ]
        return [(event, module) for event, target in targets for module in choices(target)]

    @cached_property
    def first_shard(self) -> dict[int, Event]:
        """{id of a module: the first call that shards it}."""
        return {id(module): event for event, module in reversed(self.shards)}

    @cached_property
    def roots(self) -> dict[int, Value]:
        """The outermost modules of all that is sharded."""
        return {id(root_of(module)): root_of(module) for _, module in self.shards}

    def sharded_by(self, value: Value, event: Event) -> Event | None:
        """The call that had sharded a value, itself, by the time of an event."""
        shard = self.first_shard.get(id(value))
        return shard if shard is not None and covers(shard, event) else None

    def managed_by(self, value: Value, event: Event) -> Event | None:
        """The call that had sharded a value, or what holds it."""
        found = ((holder, self.sharded_by(holder, event)) for holder in holders(value))
        known = (
            one
            for holder, one in found
            # Parameters that fully_shard ignores may be those of this very part: it is not known to
            # be sharded (right scripts of the exam (lint)).
            if one and (holder is value or "ignored_params" not in one.kwargs)
        )
        return next(known, None)  # those may be the parameters of this part

    @cached_property
    def optimizers(self) -> list[tuple[Event, list[Value]]]:
        """(construction of an optimizer, the models whose parameters it was given)."""
        made = self.matching(is_optimizer)
        made += [
            e for e in self.ops(NEW) if e.result.cls is not None and _inherits_optimizer(e.result)
        ]
        return [(event, models_of(event)) for event in sorted(made, key=lambda e: e.index)]

    @cached_property
    def trained(self) -> dict[int, Value]:
        """The models whose parameters some optimizer holds."""
        return {id(m): m for _, models in self.optimizers for m in models}

    def forwards(self, value: Value) -> list[Event]:
        """The calls of a module."""
        return [e for e in self.ops(CALL) if e.on is not None and value in choices(e.on)]

    def escapes(self, value: Value, after: int = -1, before: int = 1 << 60) -> bool:
        """Whether this value was passed to code that is not followed."""
        events = (
            e
            for e in self.events[after + 1 : before]
            if e.op not in (CALL, NEW, STORE, ITERATE, SHARD)
        )
        given = (part for event in events if not sanitize(event) for part in event.given())
        return any(value is part or value in part.parts for part in given)

    def hit(self, rule: str, message: str, event: Event) -> Hit:
        """A hit at the line of an event."""
        return hit_at(rule, message, event.module, event.line, event.function)


def hit_at(rule: str, message: str, module: Module, line: int, function: str) -> Hit:
    """A hit at a line."""
    return Hit(
        rule,
        message,
        Place(file=str(module.path), line=line, function=function, code=module.code(line)),
    )


_DISTRIBUTED = ("fsdp.", "dist.", "dcp.", "dsd.", "tp.", "tensor.")
_TRAINING = ("fsdp.", "dcp.", "dsd.", "tp.")
_METHODS = ("full_tensor", "to_local", "set_requires_gradient_sync", "set_requires_all_reduce")
_HARMLESS = (*_DISTRIBUTED, "builtins.", "torch.", "data.", "F.", "ac.", "logging.")


def is_distributed(op: str, method: str) -> bool:
    """Whether a function is one of torch's distributed packages, or a method is that of what comes
    from them.
    """
    return op.startswith(_DISTRIBUTED) or method in _METHODS


def sanitize(event: Event) -> bool:
    """Whether a call is one of torch's or Python's own, or a method."""
    return not event.op or event.op.startswith(_HARMLESS)


def is_optimizer(name: str) -> bool:
    """Whether the name of an external class is an optimizer's."""
    head, _, last = name.rpartition(".")
    if head == "torch.optim":
        return last[:1].isupper() and last != "Optimizer"
    known = (
        "AdamW8bit",
        "Adam8bit",
        "PagedAdamW8bit",
        "AdamWFp8",
        "Adafactor",
        "Lion",
        "Muon",
        "DistributedShampoo",
    )
    return last in known


def _inherits_optimizer(value: Value) -> bool:
    names = [ast.unparse(base).rpartition(".")[2] for base in value.cls.bases]
    return any(
        name == "Optimizer" or (name.startswith("Ada") and is_optimizer(f"torch.optim.{name}"))
        for name in names
    )


def models_of(event: Event) -> list[Value]:
    """The modules whose `parameters()` went into a call's arguments."""
    found: list[Value] = []
    for given in event.given():
        for value in reach(given):
            models: list[Value] = []
            if (
                value.kind == "made"
                and value.name in ("parameters", "named_parameters")
                and value.event is not None
            ):
                models = choices(value.event.on)
            elif value.kind == "item" and value.name == "parameter" and value.owner is not None:
                models = [value.owner]
            found += [model for model in models if all(model is not seen for seen in found)]
    return found

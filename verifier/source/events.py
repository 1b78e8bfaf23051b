"""What a followed script does, in order: calls, stores and iterations, each with the conditions under which it happens."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from ..finding import Hit
from ..trace.events import Place
from .coverage import Missed
from .project import Module, Project
from .values import GLOBAL, Value, choices, holders, reach, root_of

SHARD = "fsdp.fully_shard"
CALL = "(call)"  # an instance or an unknown value is called: a module's forward
NEW = "(new)"  # an object of a project class is made
STORE = "(store)"  # `on.method = args[0]`
ITERATE = "(iterate)"


class Guard:
    """`test` held (`branch` True) or did not hold."""

    __slots__ = ("branch", "node", "test")

    def __init__(self, node: ast.AST, test: Value, branch: bool) -> None:
        self.node, self.test, self.branch = node, test, branch


class Event:
    """One call or store. `op` is the canonical name of an external function, or one of the words above, or "" for a method."""

    __slots__ = (
        "args",
        "caught",
        "discarded",
        "forked",
        "function",
        "guards",
        "index",
        "kwargs",
        "loops",
        "method",
        "module",
        "node",
        "on",
        "op",
        "open",
        "result",
        "withs",
    )

    def __init__(self, index: int, op: str, node: ast.AST, module: Module, function: str) -> None:
        self.index, self.op, self.node, self.module, self.function = index, op, node, module, function
        self.method = ""
        self.on: Value | None = None
        self.args: list[Value] = []
        self.kwargs: dict[str, Value] = {}
        self.open = False  # there may be more arguments than are known
        self.guards: tuple[Guard, ...] = ()
        self.loops: tuple[ast.AST, ...] = ()
        self.withs: tuple[Value, ...] = ()
        self.caught = False
        self.discarded = False
        self.forked = False  # it is one of several things that the called value may be
        self.result: Value = Value("unknown")

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
    def line(self) -> int:
        """Where it stands."""
        return getattr(self.node, "lineno", 1)

    @property
    def on_some_ranks(self) -> Guard | None:
        """The condition that only some ranks of the world meet, if there is one."""
        found = (g for g in self.guards if g.test.rank == GLOBAL and not _asks_world(g.node))
        return next(found, None)


def _asks_world(node: ast.AST) -> bool:
    """Whether a condition also asks how many ranks there are, or whether there are any."""
    test = getattr(node, "test", node)
    names = (getattr(n, "id", None) or getattr(n, "attr", None) or "" for n in ast.walk(test))
    return any("world" in name.lower() or name in ("is_initialized", "num_processes") for name in names)


def covers(first: Event, second: Event) -> bool:
    """Whether `first` has happened whenever `second` happens."""
    if first.index >= second.index:
        return False
    held = {(id(g.node), g.branch) for g in second.guards}
    return all((id(g.node), g.branch) in held for g in first.guards)


def exclusive(one: Event, other: Event) -> bool:
    """Whether the two stand in opposite branches."""
    held = {(id(g.node), not g.branch) for g in other.guards}
    return any((id(g.node), g.branch) in held for g in one.guards)


class Flow:
    """All events of one entry: a script from its first line (`whole`), or a function that nobody in sight calls."""

    def __init__(self, project: Project, whole: bool) -> None:
        self.project, self.whole = project, whole
        self.events: list[Event] = []
        self.partial = False  # it was too long, or too deep, to be followed to its end
        self.followed: set[ast.AST] = set()  # functions that were entered, and calls that are understood
        self.missed: dict[ast.AST, Missed] = {}  # calls that could not be followed
        self.rank_uses: list[ast.AST] = []  # where a rank goes into anything but a condition or an output
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
        """Whether anything of torch's distributed packages is called, or a name that comes from them."""
        return any(name.startswith(_DISTRIBUTED) for name in self.by_op) or any(m in self.by_method for m in _METHODS)

    @property
    def training(self) -> bool:
        """Whether a part of a training is in it: sharding, a backward pass, an optimizer or a checkpoint."""
        parts = any(name.startswith(_TRAINING) for name in self.by_op)
        return parts or "backward" in self.by_method or bool(self.optimizers)

    @property
    def certain(self) -> bool:
        """Whether what was not seen does not happen."""
        return self.whole and not self.partial

    @cached_property
    def shards(self) -> list[tuple[Event, Value]]:
        """(call of fully_shard, one module that it shards)."""
        found = []
        for event in self.ops(SHARD):
            given = event.arg(0, "module")
            if given is not None:
                targets = given.parts if given.kind in ("list", "tuple") else [given]
                found += [(event, module) for target in targets for module in choices(target)]
        return found

    @cached_property
    def first_shard(self) -> dict[int, Event]:
        """{id of a module: the first call that shards it}."""
        found: dict[int, Event] = {}
        for event, module in self.shards:
            found.setdefault(id(module), event)
        return found

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
        found = (self.sharded_by(holder, event) for holder in holders(value))
        return next((shard for shard in found if shard is not None), None)

    @cached_property
    def optimizers(self) -> list[tuple[Event, list[Value]]]:
        """(construction of an optimizer, the models whose parameters it was given)."""
        made = self.matching(is_optimizer)
        made += [e for e in self.ops(NEW) if e.result.cls is not None and _inherits_optimizer(e.result)]
        return [(event, models_of(event)) for event in sorted(made, key=lambda e: e.index)]

    @cached_property
    def trained(self) -> dict[int, Value]:
        """The models whose parameters some optimizer holds."""
        return {id(m): m for _, models in self.optimizers for m in models}

    def forwards(self, value: Value) -> list[Event]:
        """The calls of a module."""
        return [e for e in self.ops(CALL) if e.on is not None and value in choices(e.on)]

    def escapes(self, value: Value, after: int = -1, before: int = 1 << 60) -> bool:
        """Whether code that is not followed was handed this value."""
        for event in self.events[after + 1 : before]:
            if event.op in (CALL, NEW, STORE, ITERATE, SHARD) or sanitize(event):
                continue
            if any(value is part or value in part.parts for part in event.given()):
                return True
        return False

    def hit(self, rule: str, told: str, event: Event) -> Hit:
        """A hit at the line of an event."""
        return hit_at(rule, told, event.module, event.line, event.function)


def hit_at(rule: str, told: str, module: Module, line: int, function: str) -> Hit:
    """A hit at a line."""
    return Hit(rule, told, Place(file=str(module.path), line=line, function=function, code=module.code(line)))


_DISTRIBUTED = ("fsdp.", "dist.", "dcp.", "dsd.", "tp.", "tensor.")
_TRAINING = ("fsdp.", "dcp.", "dsd.", "tp.")
_METHODS = ("full_tensor", "to_local", "set_requires_gradient_sync", "set_requires_all_reduce")
_HARMLESS = (
    "builtins.",
    "torch.",
    "dist.",
    "dcp.",
    "dsd.",
    "fsdp.",
    "tensor.",
    "data.",
    "F.",
    "ac.",
    "tp.",
    "logging.",
)


def sanitize(event: Event) -> bool:
    """Whether a call is one of torch's or Python's own, or a method."""
    return not event.op or event.op.startswith(_HARMLESS)


def is_optimizer(name: str) -> bool:
    """Whether the name of an external class is an optimizer's."""
    head, _, last = name.rpartition(".")
    if head == "torch.optim":
        return last[:1].isupper() and last != "Optimizer"
    known = ("AdamW8bit", "Adam8bit", "PagedAdamW8bit", "AdamWFp8", "Adafactor", "Lion", "Muon", "DistributedShampoo")
    return last in known


def _inherits_optimizer(value: Value) -> bool:
    names = (ast.unparse(base).rpartition(".")[2] for base in value.cls.bases)
    return any(
        name == "Optimizer" or (is_optimizer(f"torch.optim.{name}") and name.startswith("Ada")) for name in names
    )


def models_of(event: Event) -> list[Value]:
    """The modules whose `parameters()` went into a call's arguments."""
    found: list[Value] = []
    for given in event.given():
        for value in reach(given):
            if value.kind == "made" and value.name in ("parameters", "named_parameters") and value.event is not None:
                found += [m for m in choices(value.event.on) if all(m is not seen for seen in found)]
            elif value.kind == "item" and value.name == "parameter" and value.owner is not None:
                found += [m for m in [value.owner] if all(m is not seen for seen in found)]
    return found

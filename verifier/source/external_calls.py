"""Following calls of external functions: the properties of their results that detectors need."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from .events import SHARD, STORE, Event
from .torch_names import COLLECTIONS, COMPUTES, LAUNCHERS, PLAIN, STARTERS, SYNCS
from .unresolved_calls import Noting
from .values import GLOBAL, RANK_NAMES, SUB, Value, choices, const, either, spread


class Call(NamedTuple):
    """A call with its arguments; an open one may have more than are known."""

    node: ast.AST
    args: list[Value]
    kwargs: dict[str, Value]
    is_open: bool = False

    def after(self, bound: list[Value], partial: Event) -> Call:
        """The same with what a `functools.partial` has bound before."""
        kwargs = {**partial.kwargs, **self.kwargs}
        return Call(self.node, [*bound, *self.args], kwargs, self.is_open or partial.open)


class ExternalCalls(Noting):
    """The part of the follower that knows what external functions give and do."""

    def _event(self, op: str, call: Call) -> Event:
        event = self.emit(op, call.node, args=call.args)
        event.kwargs, event.open, event.forked = call.kwargs, call.is_open, self.forked
        return event

    def _made(self, event: Event, name: str) -> Value:
        event.result = made = Value(
            "made", name, [*event.args, *event.kwargs.values()], node=event.node, event=event
        )
        if event.op.startswith(COMPUTES) or not event.op:
            made.rank, made.local = spread(made.parts)
        return made

    def store(self, base: Value, attr: str, value: Value, node: ast.AST) -> None:
        """`base.attr = value`."""
        event = self.emit(STORE, node, attr, base, [value])
        for one in choices(base):
            old = one.attrs.get(attr)
            keep = old is not None and old.kind != "const" and bool(event.guards)
            one.attrs[attr] = either([old, value]) if keep and old is not None else value
            if one.kind != "object" or self.is_module(one):
                for part in choices(value):
                    if (
                        part.owner is None
                        and part is not one
                        and (part.kind in ("made", "object", "list"))
                    ):
                        part.owner = one

    def _external(self, event: Event) -> Value:
        """The result of an external function."""
        known = _KNOWN.get(event.op)
        result = known(self, event) if known is not None else None
        return self._any_other(event) if result is None else result

    def _any_other(self, event: Event) -> Value:
        op = event.op
        if event.given_rank and op not in PLAIN and not op.startswith(("logging.", "builtins.")):
            self.flow.rank_uses.append(event.node)
        return self._made(event, op)

    def _sharded(self, event: Event) -> Value:
        event.result = event.arg(0, "module") or Value("unknown")
        return event.result

    def _synced(self, event: Event) -> None:
        """A collective in place."""
        value = event.arg(0, "tensor") or event.arg(0, "object_list")
        for one in choices(value) if value is not None else ():
            one.local, one.rank, one.synced = False, 0, True
            if one.kind in ("list", "tuple"):
                one.parts = [Value("unknown", "synced", synced=True) for _ in one.parts]
                one.attrs = {}

    def _rank(self, event: Event) -> Value:
        self._made(event, event.op).rank = SUB if event.arg(0, "group") is not None else GLOBAL
        return event.result

    def _variable_of(self, event: Event) -> Value | None:
        return self.variable(event.args[0]) if event.args else None

    def _getattr(self, event: Event) -> Value | None:
        if len(event.args) > 1 and isinstance(event.args[1].const, str):
            return self.attribute(event.args[0], event.args[1].const, event.node)
        return None

    def _setattr(self, event: Event) -> None:
        if len(event.args) > 2 and isinstance(event.args[1].const, str):
            self.store(event.args[0], event.args[1].const, event.args[2], event.node)

    def _collection(self, event: Event) -> Value | None:
        if not event.args:
            return None
        first = event.args[0]
        if first.kind in ("list", "tuple", "dict") and event.op != "builtins.dict":
            return Value("list", first.name, first.parts, rank=first.rank, local=first.local)
        inside = self.element(first) if first.kind != "dict" else None
        return first if inside is None else Value("list", "many", [inside])

    def _new_dict(self, event: Event) -> Value | None:
        if event.args:
            return self._collection(event)
        value = Value("dict", "open" if event.open else "")
        for key, item in event.kwargs.items():
            self.put(value, const(key), item)
        return value

    def _super(self, event: Event) -> Value:
        owner = self.frame.names.get("self")
        return Value("super", home=owner) if owner is not None else Value("unknown")

    def _import_module(self, event: Event) -> Value | None:
        name = event.args[0].const if event.args else None
        if not isinstance(name, str):
            return None
        module = self.project.find(name, event.module.path)
        if module is None:
            return None
        self.load(module)
        return Value("file", name, home=module)

    def _launched(self, event: Event) -> Value | None:
        if not event.args or event.args[0].kind != "def":
            return None
        given = event.arg(1, "args")
        args = [free("rank"), *(given.parts if given is not None else [])]
        self.call_function(event.args[0], args, {}, event.node)
        return self._made(event, event.op)

    def _started(self, event: Event) -> Value | None:
        if not event.args:
            return None
        first = event.args[0]
        return self.call_function(first, [], {}, event.node) if first.kind == "def" else first

    def _container(self, event: Event) -> Value:
        """A module that holds the modules that it is given."""
        value = self._any_other(event)
        for given in event.args:
            for part in given.parts if given.kind in ("list", "dict") else [given]:
                for one in choices(part):
                    one.owner = one.owner or value
        return value

    def _clipped(self, event: Event) -> Value:
        value = self._any_other(event)
        value.local = False  # the norm is that of all shards
        return value


_Result = Callable[[ExternalCalls, Event], Value | None]
# What the functions do that are more than a new value; without a result they give one nevertheless.
_KNOWN: dict[str, _Result] = {
    SHARD: ExternalCalls._sharded,
    **dict.fromkeys(SYNCS, ExternalCalls._synced),
    "dist.get_rank": ExternalCalls._rank,
    "dist.get_node_local_rank": ExternalCalls._rank,
    "os.environ.get": ExternalCalls._variable_of,
    "os.environ.pop": ExternalCalls._variable_of,
    "os.getenv": ExternalCalls._variable_of,
    "builtins.getattr": ExternalCalls._getattr,
    "builtins.setattr": ExternalCalls._setattr,
    **dict.fromkeys(COLLECTIONS, ExternalCalls._collection),
    "builtins.dict": ExternalCalls._new_dict,
    "builtins.super": ExternalCalls._super,
    "importlib.import_module": ExternalCalls._import_module,
    **dict.fromkeys(LAUNCHERS, ExternalCalls._launched),
    **dict.fromkeys(STARTERS, ExternalCalls._started),
    "torch.nn.ModuleList": ExternalCalls._container,
    "torch.nn.ModuleDict": ExternalCalls._container,
    "torch.nn.Sequential": ExternalCalls._container,
    "torch.nn.utils.clip_grad_norm_": ExternalCalls._clipped,
}


def free(name: str) -> Value:
    """A parameter that no visible call passes."""
    return Value("free", name, rank=GLOBAL if name in RANK_NAMES else 0)

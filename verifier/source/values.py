"""What a followed script's names can stand for: not values, but where a value came from."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

GLOBAL, SUB = 2, 1  # how a value depends on the rank: on its number in the world, or in a part of the mesh

# Names under which programs that we cannot see into hand over a rank.
RANK_NAMES = frozenset(
    {"rank", "global_rank", "local_rank", "process_index", "local_process_index", "is_main_process", "main_process"}
    | {"is_local_main_process", "is_master", "is_main", "is_rank_zero", "is_rank0", "is_global_zero", "master_process"}
)
RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})


class Value:
    """`kind` says what it is:

    name (an external dotted name), file (a module of the project), def, class, object (of a project class), made (what an
    external call gave), attr, item, const, list, dict, either (one of `parts`), derived (computed from `parts`), free
    (a parameter that nobody gives), unknown.
    """

    __slots__ = (
        "attrs",
        "cls",
        "const",
        "event",
        "home",
        "key",
        "kind",
        "local",
        "name",
        "node",
        "owner",
        "parts",
        "rank",
        "synced",
    )

    def __init__(
        self,
        kind: str,
        name: str = "",
        parts: Iterable[Value] = (),
        owner: Value | None = None,
        const: Any = None,
        node: ast.AST | None = None,
        home: Any = None,
    ) -> None:
        self.kind, self.name, self.owner, self.const, self.node, self.home = kind, name, owner, const, node, home
        self.parts = list(parts)
        self.attrs: dict[str, Value] = {}
        self.key: Value | None = None  # of an item: by what it was taken
        self.cls: Any = None  # the ClassInfo of an object or class
        self.event: Any = None  # the Event that made it
        self.rank = 0
        self.local = False  # other ranks hold another value: a loss, a batch
        self.synced = False  # a collective has made it the same on every rank

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name or self.const or ''}>"


def const(value: Any) -> Value:
    """A constant."""
    return Value("const", const=value)


def either(values: Iterable[Value]) -> Value:
    """One of the values; the same value if they are one."""
    flat: list[Value] = []
    for value in values:
        for part in value.parts if value.kind == "either" else (value,):
            if not any(
                part is seen or (part.kind == seen.kind == "const" and part.const == seen.const) for seen in flat
            ):
                flat.append(part)
    if len(flat) == 1:
        return flat[0]
    joined = Value("either", parts=flat[:8])
    joined.rank = max((part.rank for part in flat), default=0)
    joined.local = any(part.local for part in flat)
    return joined


def derived(name: str, parts: Iterable[Value], node: ast.AST | None = None) -> Value:
    """Something computed from other values; it depends on the rank if one of them does."""
    value = Value("derived", name, parts, node=node)
    ranks = [part.rank for part in value.parts if part.rank]
    value.rank = min(ranks) if ranks else 0
    value.local = any(part.local for part in value.parts)
    return value


def choices(value: Value) -> list[Value]:
    """All that a value can be."""
    return value.parts if value.kind == "either" else [value]


def root_of(value: Value) -> Value:
    """The outermost module that holds this one, as far as is known."""
    for _ in range(20):
        if value.owner is None:
            break
        value = value.owner
    return value


def holders(value: Value) -> Iterator[Value]:
    """The value and what holds it, outwards."""
    for _ in range(20):
        yield value
        if value.owner is None:
            return
        value = value.owner


def reach(value: Value, limit: int = 300) -> Iterator[Value]:
    """All values that went into a value, itself first; not through objects' attributes."""
    queue, seen = [value], {id(value)}
    while queue and len(seen) < limit:
        current = queue.pop(0)
        yield current
        more = [
            *current.parts,
            *([current.owner] if current.owner is not None and current.kind in ("attr", "item") else []),
        ]
        for part in more:
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(part)

"""What a followed script's names can stand for: not values, but where a value came from."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

GLOBAL, SUB = (
    2,
    1,
)  # how a value depends on the rank: on its number in the world, or in a part of the mesh

# Names that hold a rank by convention, where its source is not visible.
RANK_NAMES = frozenset(
    {
        "rank",
        "global_rank",
        "local_rank",
        "process_index",
        "local_process_index",
        "is_main_process",
        "main_process",
    }
    | {
        "is_local_main_process",
        "is_master",
        "is_main",
        "is_rank_zero",
        "is_rank0",
        "is_global_zero",
        "master_process",
    }
)
RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
)


class Value:
    """`kind` says what it is:

    name (an external dotted name), file (a module of the project), def, class, object (of a project
    class), made (returned by an external call), attr, item, const, list, dict, either (one of
    `parts`), derived (computed from `parts`), free (a parameter that no call passes), unknown.
    """

    __slots__ = (
        *("attrs", "cls", "const", "event", "home", "kind", "local"),
        *("name", "node", "owner", "parts", "rank", "synced"),
    )

    def __init__(
        self,
        kind: str,
        name: str = "",
        parts: Iterable[Value] = (),
        *,
        owner: Value | None = None,
        const: Any = None,
        node: ast.AST | None = None,
        home: Any = None,
        event: Any = None,  # the Event that made it
        cls: Any = None,  # the ClassInfo of an object or class
        rank: int = 0,
        local: bool = False,  # other ranks hold another value: a loss, a batch
        synced: bool = False,  # a collective has made it the same on every rank
        attrs: dict[str, Value] | None = None,
    ) -> None:
        self.kind, self.name, self.owner, self.const, self.node, self.home = (
            kind,
            name,
            owner,
            const,
            node,
            home,
        )
        self.event, self.cls, self.rank, self.local, self.synced = event, cls, rank, local, synced
        self.parts = [*parts]  # several values may be made from one list
        self.attrs: dict[str, Value] = {} if attrs is None else attrs


def const(value: Any) -> Value:
    """A constant."""
    return Value("const", const=value)


def either(values: Iterable[Value]) -> Value:
    """One of the values; the same value if they are one."""
    values = [*values]
    if len(values) == 1 and values[0].kind != "either":
        return values[0]
    found: dict[Any, Value] = {}
    for value in values:
        for part in choices(value):
            found.setdefault(("const", part.const) if part.kind == "const" else id(part), part)
    flat = [*found.values()]
    if len(flat) == 1:
        return flat[0]
    one = Value("either", "", flat[:8])
    for part in flat:
        one.rank, one.local = max(one.rank, part.rank), one.local or part.local
    return one


def derived(name: str, parts: Iterable[Value], node: ast.AST | None = None) -> Value:
    """Something computed from other values; it depends on the rank if one of them does."""
    value = Value("derived", name, parts, node=node)
    value.rank, value.local = spread(value.parts)
    return value


def spread(parts: Iterable[Value]) -> tuple[int, bool]:
    """`rank` and `local` of what is computed from other values."""
    rank, local = 0, False
    for part in parts:
        if part.rank and not 0 < rank <= part.rank:
            rank = part.rank
        local = local or part.local
    return rank, local


def choices(value: Value) -> list[Value]:
    """All that a value can be."""
    return value.parts if value.kind == "either" else [value]


def root_of(value: Value) -> Value:
    """The outermost module that holds this one, as far as is known."""
    return list(holders(value))[-1]


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
        owner = (
            [current.owner]
            if current.owner is not None and current.kind in ("attr", "item")
            else []
        )
        for part in (*current.parts, *owner):
            if id(part) not in seen:
                seen.add(id(part))
                queue.append(part)

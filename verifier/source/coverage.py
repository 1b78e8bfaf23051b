"""Coverage: which parts of the sources were followed, which calls were not, and why."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from .project import Project
from .roots import is_known

# Reasons, those that can hide most first: code of the project before that of libraries.
NOT_FOUND, LIMIT, UNKNOWN, DECORATED, OUTSIDE = (
    "not found",
    "limit",
    "not known",
    "decorator",
    "outside the project",
)
_ORDER = (NOT_FOUND, LIMIT, UNKNOWN, DECORATED, OUTSIDE)
_LONGEST = 80


@dataclass(frozen=True)
class Missed:
    """A call that was not followed.

    `kind` is one of the words above; `calls` counts those of the same callee and reason.
    """

    callee: str
    file: str
    line: int
    kind: str
    reason: str
    calls: int = 1


@dataclass(frozen=True)
class Coverage:
    """`functions` counts what was followed, the top-level code of a file as one; `missed` has each
    callee once.
    """

    files: tuple[Path, ...]
    functions: int
    missed: tuple[Missed, ...]
    without_training: tuple[Path, ...]

    @property
    def calls_missed(self) -> int:
        """How many calls were not followed."""
        return sum(one.calls for one in self.missed)


def outside(project: Project, dotted: str) -> tuple[str, str] | None:
    """(kind, reason) why a function of that name cannot be followed; None where that is not
    needed.
    """
    if dotted.startswith("."):
        return NOT_FOUND, f"module {dotted.rpartition('.')[0].rstrip('.') or dotted} not found"
    top, _, rest = dotted.partition(".")
    if top == "builtins":
        return (
            None
            if hasattr(builtins, rest.partition(".")[0])
            else (NOT_FOUND, f"no definition of {rest} was found")
        )
    if is_known(top):
        return None
    parts = dotted.split(".") if project.unread else []
    for prefix in (".".join(parts[:number]) for number in range(len(parts), 0, -1)):
        if prefix in project.unread:
            return NOT_FOUND, f"module {prefix} {project.unread[prefix]}"
    if project.has(top):
        return NOT_FOUND, f"module {dotted.rpartition('.')[0] or dotted} not found in the project"
    return OUTSIDE, f"outside the project: module {top}"


def callee_of(node: ast.AST) -> str:
    """The source of what is called, shortened."""
    return shortened(node.func if isinstance(node, ast.Call) else node, _LONGEST) or "?"


def shortened(node: ast.AST, limit: int) -> str:
    """The source of a node in one line of at most `limit` characters; "" where Python cannot write
    it.
    """
    try:
        text = " ".join(ast.unparse(node).split())
    except (ValueError, RecursionError, AttributeError):
        return ""
    return text if len(text) <= limit else f"{text[: limit - 4]} ..."


def merged(
    missed: Iterable[tuple[ast.AST, Missed]], followed: Collection[ast.AST]
) -> tuple[Missed, ...]:
    """Each callee and reason once, at its first line, the most severe first; without calls that
    were followed elsewhere.
    """
    first: dict[tuple[str, str], Missed] = {}
    unique = {node: one for node, one in missed if node not in followed}
    for one in sorted(
        unique.values(), key=lambda m: (_ORDER.index(m.kind), m.file, m.line, m.callee)
    ):
        key = (one.callee, one.reason)
        known = first.get(key)
        first[key] = one if known is None else replace(known, calls=known.calls + 1)
    return tuple(first.values())

"""A watched value: an expression in the frames of the training loop, or files, and between which
runs it must agree.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ..errors import UserError

ACROSS = ("ranks", "resume", "world", "single")
FILES = "file:"


@dataclass(frozen=True)
class Watched:
    """`expression` is evaluated at each step; `across`: ranks of a run, a resume, other numbers of
    ranks, one process.

    `file:` and a glob pattern stand for what rank 0 finds in the files of that name.
    """

    expression: str
    across: tuple[str, ...] = ACROSS


def watched(text: str) -> Watched:
    """What a text asks to watch: `best`, `ema.shadow across=ranks,resume`, `module:name`,
    `sampler.position rank-local`, `file:out/*.pt`.

    Raises UserError.
    """
    words = text.split()
    options = [word for word in words if word == "rank-local" or word.startswith("across=")]
    expression = " ".join(word for word in words if word not in options)
    across: tuple[str, ...] = ACROSS
    for option in options:
        if option == "rank-local":
            across = tuple(name for name in across if name == "resume")
            continue
        across = tuple(option.partition("=")[2].split(","))
        if unknown := [name for name in across if name not in ACROSS]:
            raise UserError(
                f"watch: {text!r}: across={unknown[0]}: expected one or more of {', '.join(ACROSS)}"
            )
    if expression.startswith(FILES):
        return Watched(expression, tuple(name for name in across if name != "ranks"))
    if parts_of(expression.rpartition(":")[2]) is None:
        raise UserError(
            f"watch: {text!r}: expected names, attributes and items, such as `ema.shadow`,"
            " `best['loss']` or `module:name`"
        )
    return Watched(expression, across)


def parts_of(expression: str) -> list[tuple[str, str | int]] | None:
    """[("name", "ema"), ("attribute", "shadow"), ("item", "weight")] of `ema.shadow["weight"]`;
    None for any other expression.
    """
    try:
        node: ast.expr = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    found: list[tuple[str, str | int]] = []
    while True:
        match node:
            case ast.Attribute(attr=attr):
                found.append(("attribute", attr))
            case ast.Subscript(slice=ast.Constant(value=str() | int() as key)):
                found.append(("item", key))
            case ast.Name(id=name):
                return [("name", name), *reversed(found)]
            case _:
                return None
        node = node.value

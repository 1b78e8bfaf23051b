"""Lookup of lines in the sources, for rules that know what happened but not where."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

from ..evidence import Sources
from ..trace.events import Place

# Words of a norm in a statement: they place a clip on local norms (faults manual_local_norm_clip).
_NORMS = ("norm", "pow(2)", "** 2", "**2", "square")
_LOCAL = ("to_local()", "_local_tensor")
_GRADIENTS = re.compile(r"\b(grads?|gradients?)\b")


# Names by which a function that reads gradients takes their length: it may clip. Others need no
# huge gradients.
_LENGTHS = {"norm", "vector_norm", "get_total_norm", "square", "pow", "dot"}


def find_local_norm(sources: Sources) -> Place | None:
    """The statement of the project that takes the local part of gradients, in a function that goes
    on to take a norm; functions that name gradients come first.
    """
    others = None
    for path in sources.project:
        functions = list(_functions(sources, path))
        local_part = _LOCAL + tuple(f"{name}(" for name, own in functions if _returns_local(own))
        for function, statements in functions:
            local = [s for s in statements if any(word in s[1] for word in local_part)]
            norms = [s for s in statements if any(word in s[1] for word in _NORMS)]
            if local and norms:
                line, text = next((s for s in local if s in norms), local[0])
                code = text.splitlines()[0].strip()
                place = Place(file=path, line=line, function=function, code=code)
                # A count of local elements beside an argument `max_grad_norm` is no clip.
                if any(_GRADIENTS.search(s[1]) for s in local):
                    return place
                others = others or place
    return others


def _returns_local(statements: list[tuple[int, str]]) -> bool:
    """Whether a function returns the local part of a tensor, and does nothing else."""
    return len(statements) == 1 and (
        statements[0][1].startswith("return") and any(word in statements[0][1] for word in _LOCAL)
    )


def may_clip(sources: Sources) -> bool:
    """Whether the project names anything that clips, or takes a norm or squares in a function that
    reads gradients.
    """
    for path in sources.project:
        for function in (
            n for n in ast.walk(sources.tree(path)) if isinstance(n, ast.FunctionDef | ast.Lambda)
        ):
            names = {
                n.attr if isinstance(n, ast.Attribute) else n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Attribute | ast.Name)
            }
            if any("clip" in name for name in names) or ("grad" in names and names & _LENGTHS):
                return True
    return False


def find_shard_use(sources: Sources, cls: str) -> Place | None:
    """The first statement of class `cls` (or of a function that is no method, if it has none) that
    takes a tensor's shard.
    """
    found: dict[bool, Place] = {}  # by whether it is in the class
    for path in sources.project:
        tree = sources.tree(path)
        own = {
            id(n)
            for c in ast.walk(tree)
            if isinstance(c, ast.ClassDef) and c.name == cls
            for n in ast.walk(c)
        }
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and node.attr in ("to_local", "_local_tensor"):
                    code = sources.line(path, node.lineno)
                    place = Place(file=path, line=node.lineno, function=function.name, code=code)
                    found.setdefault(id(node) in own, place)
    return found.get(True, found.get(False))


def find_scale(sources: Sources, backward: Place) -> Place | None:
    """The last statement above a backward, in its function, that divides or multiplies what the
    backward is called on.
    """
    nodes = list(ast.walk(sources.tree(backward.file)))
    called = [n for n in nodes if isinstance(n, ast.Call) and n.lineno == backward.line]
    losses = {n.id for call in called for n in ast.walk(call) if isinstance(n, ast.Name)}
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    start = max(
        (f.lineno for f in functions if f.lineno <= backward.line <= (f.end_lineno or 0)), default=0
    )
    found = None
    for node in sorted((n for n in nodes if isinstance(n, ast.stmt)), key=lambda n: n.lineno):
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.Div() | ast.Mult()))
                | ast.AugAssign(target=ast.Name(id=name), op=ast.Div() | ast.Mult())
            ) if name in losses and start <= node.lineno < backward.line:
                found = replace(
                    backward, line=node.lineno, code=sources.line(backward.file, node.lineno)
                )
    return found


def _functions(sources: Sources, path: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """(name, [(line, source) of each simple statement]) of every function, then of the module
    itself.
    """
    source, tree = sources.texts.get(path, ""), sources.tree(path)
    simple = ast.Assign | ast.AugAssign | ast.Return | ast.Expr | ast.AnnAssign
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    owners: list[tuple[str, list[ast.AST]]] = [(f.name, list(ast.walk(f))) for f in functions]
    owners.append(("<module>", list(tree.body)))
    for name, nodes in owners:
        found = [
            (n.lineno, ast.get_source_segment(source, n) or "")
            for n in nodes
            if isinstance(n, simple)
        ]
        yield name, sorted(found)

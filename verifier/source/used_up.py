"""Generators that code goes through a second time, when nothing is left in them.

Pure functions on syntax trees.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeGuard

from .bound_names import name_or_callee

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Methods of nn.Module that make a generator, and builtins whose result is one.
_MODULES = {
    *("parameters", "named_parameters", "buffers", "named_buffers"),
    *("modules", "named_modules", "children", "named_children"),
}
_BUILTINS = {"filter", "map", "zip", "iter"}
# Calls that go through the whole of their first argument.
_COLLECT = {"list", "tuple", "set", "dict", "sum", "sorted"}
_CONSUMERS = re.compile(
    r"clip_grad_norm_?|clip_grad_value_|clip_grads_with_norm_|get_total_norm|"
    r"SGD|Adam\w*|RMSprop|Adagrad|Muon|Lion"
)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class UsedUp:
    """A generator, and the two places that go through it."""

    file: str
    made: ast.expr
    first: ast.AST
    second: ast.AST
    name: str  # of the variable or parameter that holds it
    function: str  # "" or that in which it is a parameter
    within: str  # the function that makes it


class _Scope:
    """A function, or the top of a file, without the scopes in it."""

    def __init__(self, file: str, tree: ast.AST, own: Collection[str]) -> None:
        self.file, self.tree = file, tree
        self.name = tree.name if _is_function(tree) else "<module>"
        self.nodes = list(_within(tree))
        self.stores = Counter(
            n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        )
        self.loops = [node for node in self.nodes if isinstance(node, _LOOPS)]
        # the places that go through all of what a name holds, in order
        self.uses: dict[str, list[ast.Name]] = {}
        found = (use for node in self.nodes if (use := _use(node, own)) is not None)
        for use in sorted(found, key=lambda n: (n.lineno, n.col_offset)):
            self.uses.setdefault(use.id, []).append(use)

    def through(self, name: str, made: ast.stmt | None = None) -> tuple[ast.AST, ast.AST] | None:
        """Two uses of a name, the second after the first; None if it is set again."""
        if self.stores[name] > (made is not None):
            return None
        since = made.lineno if made is not None else 0
        uses = [use for use in self.uses.get(name, []) if use.lineno > since]
        for use in uses if made is not None else ():
            # made before the loop: from its second turn on nothing is left
            if any(use in _body(loop) and made not in _body(loop) for loop in self.loops):
                return use, use
        for first, second in pairwise(uses):
            if not self._exclusive(first, second):
                return first, second
        return None

    def _exclusive(self, first: ast.AST, second: ast.AST) -> bool:
        """Whether no run comes by both: they stand in two arms, or the first one's arm leaves."""
        for arms in map(_arms, self.nodes):
            inside = [{node for one in arm for node in ast.walk(one)} for arm in arms]
            for arm, nodes in zip(arms, inside, strict=True):
                if first in nodes and second not in nodes:
                    elsewhere = any(second in other for other in inside)
                    if elsewhere or isinstance(arm[-1], _LEAVES):
                        return True
        return False


def used_up(trees: Mapping[str, ast.Module]) -> Iterator[UsedUp]:
    """The generators of some files that are gone through twice."""
    functions = [
        (file, one) for file, tree in trees.items() for one in ast.walk(tree) if _is_function(one)
    ]
    own = _first_parameters([one for _, one in functions])
    scopes = [_Scope(file, tree, own) for file, tree in (*trees.items(), *functions)]
    names = Counter(one.name for _, one in functions)
    called = {
        scope.tree.name: scope
        for scope in scopes
        if _is_function(scope.tree) and names[scope.tree.name] == 1
    }
    for scope in scopes:
        for node in scope.nodes:
            yield from _given(scope, node, called)
            yield from _held(scope, node)


def _given(scope: _Scope, node: ast.AST, called: Mapping[str, _Scope]) -> Iterator[UsedUp]:
    """Generators that a call hands to a function which goes through its parameter twice."""
    if not isinstance(node, ast.Call) or (to := called.get(name_or_callee(node.func))) is None:
        return
    assert _is_function(to.tree)
    words = [(word.arg, word.value) for word in node.keywords if word.arg]
    for parameter, value in (*zip(_parameters(to.tree), node.args, strict=False), *words):
        if _makes(value) and (uses := to.through(parameter)) is not None:
            yield UsedUp(scope.file, value, *uses, parameter, to.name, scope.name)


def _held(scope: _Scope, node: ast.AST) -> Iterator[UsedUp]:
    """Variables that hold a generator and are gone through twice, or in each turn of a loop."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _makes(value):
            if (uses := scope.through(name, node)) is not None:
                yield UsedUp(scope.file, value, *uses, name, "", scope.name)


def _is_function(node: ast.AST) -> TypeGuard[Function]:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _parameters(function: Function) -> list[str]:
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    return [*names, *(one.arg for one in function.args.kwonlyargs)]


def _first_parameters(functions: Sequence[Function]) -> set[str]:
    """Functions of the project that go through their first parameter."""
    return {
        function.name
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.For | ast.comprehension)
        and isinstance(node.iter, ast.Name)
        and node.iter.id in _parameters(function)[:1]
    }


def _makes(value: ast.expr) -> bool:
    """Whether an expression is a generator."""
    match value:
        case ast.GeneratorExp():
            return True
        case ast.Call(func=ast.Attribute(attr=name)):
            return name in _MODULES
        case ast.Call(func=ast.Name(id=name), args=[_, *_]):
            return name in _BUILTINS
    return False


def _use(node: ast.AST, own: Collection[str]) -> ast.Name | None:
    """The name through whose value a node goes, all of it."""
    match node:
        case ast.For(iter=ast.Name() as use) | ast.comprehension(iter=ast.Name() as use):
            return None if _leaves_early(node) else use
        case ast.Call(func=ast.Name(id=name), args=[ast.Name() as use, *_]) if name in _COLLECT:
            return use
        case ast.Call(func=func, args=[ast.Name() as use, *_]):
            name = name_or_callee(func)
            return use if name in own or _CONSUMERS.fullmatch(name) else None
    return None


def _leaves_early(node: ast.AST) -> bool:
    """Whether a loop may end before its generator does."""
    return isinstance(node, ast.For) and any(
        isinstance(n, ast.Break | ast.Return) for one in node.body for n in ast.walk(one)
    )


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without those of scopes in it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, _SCOPES):
            yield child
            yield from _within(child)


def _body(loop: ast.AST) -> set[ast.AST]:
    return {node for one in getattr(loop, "body", ()) for node in ast.walk(one)}


def _arms(node: ast.AST) -> Sequence[Sequence[ast.AST]]:
    """The parts of a statement of which a run comes by one."""
    match node:
        case ast.If(body=body, orelse=orelse):
            return [arm for arm in (body, orelse) if arm]
        case ast.IfExp(body=one, orelse=other):
            return [[one], [other]]
        case ast.Match(cases=cases):
            return [one.body for one in cases]
        case ast.Try(body=body, handlers=handlers):
            return [body, *(one.body for one in handlers)]
    return []

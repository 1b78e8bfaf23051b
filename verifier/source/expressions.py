"""Following expressions: where each value comes from."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any, ClassVar

from .events import ITERATE, Guard
from .names import Frame, Names
from .torch_names import ASKS_NAMES
from .values import GLOBAL, SUB, Value, choices, const, derived, either

DEPTH = 60  # of nested expressions
_FOLDED: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class Expressions(Names):
    """The part of the follower that evaluates expressions."""

    ways: ClassVar[
        dict[type, Callable[..., Any]]
    ]  # the method for each kind of expression and statement

    def __init_subclass__(cls) -> None:
        named = {
            kind: kind.__name__.lower()
            for kind in (*ast.expr.__subclasses__(), *ast.stmt.__subclasses__())
        }
        cls.ways = {
            kind: (
                getattr(cls, f"_{name}", cls._parts)
                if issubclass(kind, ast.expr)
                else getattr(cls, f"_do_{name}", _skip)
            )
            for kind, name in named.items()
        }

    def evaluate(self, node: ast.expr | None) -> Value:
        """The value of an expression."""
        if node is None:
            return const(None)
        self.budget -= 1
        if self.budget < 0 or self.depth > DEPTH:
            self.flow.partial = True
            return Value("unknown")
        if type(node) is ast.Name:  # half of all expressions
            return self.lookup(node.id)
        if type(node) is ast.Constant:
            return const(node.value)
        self.depth += 1
        try:
            value: Value = self.ways[type(node)](self, node)
            return value
        finally:
            self.depth -= 1

    def _parts(self, node: ast.expr) -> Value:
        found = [
            self.evaluate(child)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.expr)
        ]
        return derived(type(node).__name__, found, node)

    def _attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.evaluate(node.value), node.attr, node)

    def _subscript(self, node: ast.Subscript) -> Value:
        return self.item(self.evaluate(node.value), self.evaluate(node.slice), node)

    def _binop(self, node: ast.BinOp) -> Value:
        return self._fold(type(node.op), self.evaluate(node.left), self.evaluate(node.right), node)

    def _fold(self, kind: type, left: Value, right: Value, node: ast.AST) -> Value:
        if left.kind == right.kind == "const" and kind in _FOLDED:
            simple = isinstance(left.const, int | float | str) and isinstance(
                right.const, int | float | str
            )
            pair = (left.const, right.const)
            large = any(
                len(x) > 1000 if isinstance(x, str) else isinstance(x, int) and abs(x) > 1e18
                for x in pair
            )
            text = kind in (ast.Mult, ast.Mod) and isinstance(left.const, str) | isinstance(
                right.const, str
            )
            if simple and not large and not text:
                try:
                    return const(_FOLDED[kind](left.const, right.const))
                except (TypeError, ZeroDivisionError, OverflowError):
                    return Value("unknown")
        value = derived(kind.__name__, [left, right], node)
        if value.rank and kind in _FOLDED and isinstance(node, ast.BinOp):
            self.flow.rank_uses.append(node)
        return value

    def _compare(self, node: ast.Compare) -> Value:
        left, rights = self.evaluate(node.left), [self.evaluate(c) for c in node.comparators]
        if len(rights) == 1:
            kind = type(node.ops[0])
            if (
                kind in (ast.Is, ast.IsNot)
                and rights[0].kind == "const"
                and rights[0].const is None
            ):
                if left.kind in ("const", "object", "def", "class", "list", "dict", "tuple"):
                    return const((left.const is None and left.kind == "const") == (kind is ast.Is))
                return _same_on_ranks(derived("is none", [left], node))
            value = self._fold(kind, left, rights[0], node)
            return _same_on_ranks(value) if _asks_for_presence(kind, rights[0]) else value
        return derived("compare", [left, *rights], node)

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        value = self.evaluate(node.operand)
        if value.kind == "const" and isinstance(node.op, ast.Not):
            return const(not value.const)
        if (
            value.kind == "const"
            and isinstance(node.op, ast.USub)
            and isinstance(value.const, int | float)
        ):
            return const(-value.const)
        return derived(type(node.op).__name__, [value], node)

    def _boolop(self, node: ast.BoolOp) -> Value:
        values = [self.evaluate(v) for v in node.values]
        decides = isinstance(node.op, ast.Or)
        for value in values:
            if value.kind == "const" and bool(value.const) == decides:
                return (
                    value
                    if value is values[0]
                    else derived("bool", values[: values.index(value)], node)
                )
            if value.kind != "const":
                break
        else:
            return values[-1]
        return derived("bool", values, node)

    def _ifexp(self, node: ast.IfExp) -> Value:
        test = self.evaluate(node.test)
        if test.kind == "const":
            return self.evaluate(node.body if test.const else node.orelse)
        saved, found = self.guards, []
        for branch, expression in ((True, node.body), (False, node.orelse)):
            self.guards = (*saved, Guard(node, test, branch))
            found.append(self.evaluate(expression))
        self.guards = saved
        value = either(found)
        if test.rank and value.kind == "either":
            value.rank = test.rank
        return value

    def _list(self, node: ast.List | ast.Tuple | ast.Set) -> Value:
        parts: list[Value] = []
        for item in node.elts:
            value = self.evaluate(item)
            if isinstance(item, ast.Starred):
                parts += value.parts if value.kind in ("list", "tuple") else [self.element(value)]
            else:
                parts.append(value)
        value = Value("tuple" if isinstance(node, ast.Tuple) else "list", "", parts, node=node)
        for part in parts:
            value.rank, value.local = max(value.rank, part.rank), value.local or part.local
        return value

    _tuple = _set = _list

    def _dict(self, node: ast.Dict) -> Value:
        value = Value("dict", node=node)
        for key_node, item_node in zip(node.keys, node.values, strict=True):
            item = self.evaluate(item_node)
            if key_node is None:
                value.parts += item.parts if item.kind == "dict" else [item]
                value.attrs.update(item.attrs if item.kind == "dict" else {})
                value.name = value.name if item.kind == "dict" else "open"
                continue
            self.put(value, self.evaluate(key_node), item)
        return value

    def put(self, base: Value, key: Value, item: Value) -> None:
        """`base[key] = item` in a dict."""
        if key.kind == "const":
            base.attrs[f"[{key.const}]"] = item
            base.parts.append(item)
        else:
            for name, known in base.attrs.items():
                if _may_be(key, name[1:-1]):
                    base.attrs[name] = either([known, item])  # it may be the one that is replaced
            base.parts.append(derived("entry", [key, item]))
            base.name = "open"

    def _joinedstr(self, node: ast.JoinedStr) -> Value:
        parts = [self.evaluate(v.value) for v in node.values if isinstance(v, ast.FormattedValue)]
        return derived("text", parts, node)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> Value:
        outer = self.frame
        self.frame = Frame(outer.module, outer.function, outer)
        saved, loops, chosen, local = self.guards, self.loops, 0, False  # of each rank: its files
        self.loops = (*loops, node)
        for clause in node.generators:
            source = self.evaluate(clause.iter)
            self.emit(ITERATE, node, args=[source])
            self.bind(clause.target, self.element(source))
            for test in clause.ifs:
                held = self.evaluate(test)
                chosen, local = (
                    max(chosen, held.rank),
                    local or (held.local and held.name in ASKS_NAMES),
                )
                self.guards = (*self.guards, Guard(test, held, True))
        if isinstance(node, ast.DictComp):
            entry = derived("entry", [self.evaluate(node.key), self.evaluate(node.value)])
            value = Value("dict", "open", [entry], node=node)
        else:
            one = self.evaluate(node.elt)
            value = Value(
                "list",
                "many",
                [Value("derived", "chosen", [one], local=True) if local else one],
                node=node,
            )
        self.frame, self.guards, self.loops = outer, saved, loops
        value.local, value.rank = value.parts[0].local, max(value.rank, chosen)
        return value

    _listcomp = _setcomp = _generatorexp = _dictcomp = _comprehension

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value("def", "<lambda>", node=node, home=(self.frame.module, self.frame))

    def _await(self, node: ast.Await | ast.Starred) -> Value:
        return self.evaluate(node.value)

    _starred = _await

    def _yield(self, node: ast.Yield) -> Value:
        self.frame.yields.append(self.evaluate(node.value))
        return Value("unknown")

    def _yieldfrom(self, node: ast.YieldFrom) -> Value:
        self.frame.yields.append(self.element(self.evaluate(node.value)))
        return Value("unknown")

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.bind(node.target, value)
        return value


def _skip(follower: Expressions, node: ast.AST) -> None:
    """A statement that does nothing to names."""


def _may_be(key: Value, name: str) -> bool:
    """Whether a key that is made while the script runs may be this one: not `f"rng_{rank}"` and
    "step".
    """
    text = key.node.values[0] if isinstance(key.node, ast.JoinedStr) and key.node.values else None
    return not isinstance(text, ast.Constant) or name.startswith(str(text.value))


def _asks_for_presence(kind: type, limit: Value) -> bool:
    """Whether a rank that is compared with `limit` is only asked for being there: none is
    negative.
    """
    if limit.kind != "const" or type(limit.const) is not int:
        return False
    return limit.const < 0 or (limit.const == 0 and kind in (ast.Lt, ast.GtE))


def _same_on_ranks(value: Value) -> Value:
    """A question that every rank answers alike, such as whether this is a distributed run."""
    value.rank = 0
    return value


def mesh_rank(mesh: Value) -> int:
    """What a rank in a mesh says: a number in the world if the mesh is known to have one dimension,
    else in a part of it.
    """
    for one in choices(mesh):
        shape = (
            one.event.arg(1, "mesh_shape") if one.kind == "made" and one.event is not None else None
        )
        if (
            one.name != "dist.init_device_mesh"
            or shape is None
            or shape.kind != "tuple"
            or len(shape.parts) != 1
        ):
            return SUB
    return GLOBAL

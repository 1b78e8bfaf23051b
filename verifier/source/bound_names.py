"""Names that stand for what a launch chooses: settings, the number of ranks, the device.

Pure functions on syntax trees; a name counts in all functions of its file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping

from .unreached_blocks import functions

Names = dict[str, set[str]]  # what each stands for: "settings", "world", "device"
_Function = ast.FunctionDef | ast.AsyncFunctionDef

_CASTS = ("int", "float", "str", "bool", "max", "min", "vars", "get", "getattr", "lower", "asdict")
_ROUNDS = 3  # assignments and calls through which a value is followed
_READERS = ("getenv", "environ", "argv", "cli", "CLI")
_STARTS = ("main", "command", "option", "argument")  # decorators of hydra, click and typer
_DEVICES = ("cuda", "accelerator", "mps", "xpu", "npu", "hpu")


def name_or_callee(node: ast.AST) -> str:
    """`c` of `a.b.c`, `c` of `c`, and of a call of these; "" for others."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.Call(func=func):
            return name_or_callee(func)
    return ""


def bound_names(trees: Mapping[str, ast.Module]) -> dict[str, Names]:
    """For each file: what its names stand for."""
    found: dict[str, Names] = {file: {} for file in trees}
    called = {node.name: (file, node) for file, tree in trees.items() for node in functions(tree)}
    settings = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and "dataclass" in map(name_or_callee, node.decorator_list)
    }
    nodes = {file: list(ast.walk(tree)) for file, tree in trees.items()}
    for _ in range(_ROUNDS):
        for file in trees:
            for node in nodes[file]:
                for name, kinds in _bound(node, found[file], settings):
                    found[file].setdefault(name, set()).update(kinds)
                for home, name, kinds in _given(node, found[file], called):
                    found[home].setdefault(name, set()).update(kinds)
    return found


def kinds_in(node: ast.AST, names: Names) -> set[str]:
    """What an expression reads, anywhere in it."""
    found: set[str] = set()
    for one in ast.walk(node):
        found |= _own_kinds(one) | names.get(name_or_callee(one), set())
    return found


def is_world(node: ast.AST, names: Names) -> bool:
    """Whether an expression is the number of ranks itself."""
    match node:
        case ast.Call(func=ast.Name(id="int"), args=[inner]):
            return is_world(inner, names)
        case ast.Name() | ast.Attribute():
            return "world" in names.get(name_or_callee(node), ())
    return "world" in _own_kinds(node)


def _own_kinds(node: ast.AST) -> set[str]:
    """What a node reads without those in it."""
    name = name_or_callee(node)
    match node:
        case ast.Call() if name == "get_world_size":
            return {"world"}
        case ast.Call(func=func, args=[ast.Constant(value="WORLD_SIZE"), *_]):
            return {"world"} if name == "getenv" or _is_environ(func) else set()
        case ast.Subscript(value=value, slice=ast.Constant(value="WORLD_SIZE")):
            return {"world"} if name_or_callee(value) == "environ" else set()
        case ast.Call() if name.startswith("parse") or name in _READERS:
            return {"settings"}
        case ast.Name() | ast.Attribute() if name in _READERS:
            return {"settings"}
        case ast.Attribute(value=value) if (
            name in ("is_available", "device_count") and name_or_callee(value) in _DEVICES
        ):
            return {"device"}
        case ast.Constant(value=str(text)) if text.partition(":")[0] == "cuda":
            return {"device"}
    return set()


def _is_environ(func: ast.expr) -> bool:
    return (
        isinstance(func, ast.Attribute)
        and func.attr == "get"
        and name_or_callee(func.value) == "environ"
    )


def _bound(node: ast.AST, names: Names, settings: set[str]) -> Iterator[tuple[str, set[str]]]:
    """(name, what it stands for) of an assignment or a parameter."""
    match node:
        case ast.Assign(targets=targets, value=value):
            pairs = [pair for target in targets for pair in assigned(target, value)]
        case ast.AnnAssign(value=ast.expr() as value) | ast.NamedExpr(value=value):
            pairs = [(node.target, value)]
        case ast.arg(arg=name, annotation=ast.expr() as annotation):
            if name_or_callee(annotation) in settings:
                yield name, {"settings"}
            return
        case ast.FunctionDef(args=args, decorator_list=decorators) if any(
            name_or_callee(one) in _STARTS for one in decorators
        ):
            yield from ((one.arg, {"settings"}) for one in args.args)
            return
        case _:
            return
    for at, value in pairs:
        kinds = _passed(value, names)
        if isinstance(value, ast.Call) and name_or_callee(value) in settings:
            kinds = kinds | {"settings"}
        if kinds and (name := name_or_callee(at)):
            yield name, kinds


def assigned(target: ast.expr, value: ast.expr) -> Iterable[tuple[ast.expr, ast.expr]]:
    """(target, value) of an assignment, taken apart where both are tuples."""
    if not isinstance(target, ast.Tuple):
        return [(target, value)]
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        return zip(target.elts, value.elts, strict=True)
    return [(one, value) for one in target.elts]


def _passed(value: ast.expr, names: Names) -> set[str]:
    """What a value stands for that is taken over as it is, or hardly changed."""
    own = _own_kinds(value)
    match value:
        case ast.Name() | ast.Attribute():
            own |= names.get(name_or_callee(value), set())
            if isinstance(value, ast.Attribute):
                own |= _passed(value.value, names) & {"settings"}
        case ast.Call(func=func, args=args) if name_or_callee(func) in _CASTS:
            parts = [*args, *([func.value] if isinstance(func, ast.Attribute) else [])]
            own |= {kind for part in parts for kind in _passed(part, names)}
        case ast.Subscript(value=inner) | ast.UnaryOp(operand=inner) | ast.NamedExpr(value=inner):
            own |= _passed(inner, names)
        case ast.BoolOp(values=parts):
            own |= {kind for part in parts for kind in _passed(part, names)}
        case ast.Compare(left=left, comparators=rest):
            own |= {kind for part in (left, *rest) for kind in _passed(part, names)} - {"world"}
        case ast.IfExp(test=test, body=body, orelse=orelse):
            own |= kinds_in(test, names) - {"world"}
            own |= {kind for part in (body, orelse) for kind in _passed(part, names)}
        case ast.Call(args=args) if not own and any(
            "device" in _own_kinds(part) for part in ast.walk(value)
        ):
            own |= {"device"}
    return own


def _given(
    node: ast.AST, names: Names, called: Mapping[str, tuple[str, _Function]]
) -> Iterator[tuple[str, str, set[str]]]:
    """(file, parameter, what it stands for) where a function of the project is called."""
    if not isinstance(node, ast.Call) or name_or_callee(node) not in called:
        return
    file, function = called[name_or_callee(node)]
    parameters = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    given = [*zip(parameters, node.args, strict=False)]
    given += [(one.arg, one.value) for one in node.keywords if one.arg]
    for name, value in given:
        if kinds := _passed(value, names):
            yield file, name, kinds

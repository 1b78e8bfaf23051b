"""Functions that write a file of weights, and change the weights in place before they do."""

import ast
from collections.abc import Iterator

from ..evidence import Evidence
from ..source.bound_names import name_or_callee
from ..trace.events import Place, Reached
from .reached import Seen
from .syntax import called, functions, walk

_TRAINS = {"backward", "step"}
_WRITES = {"save", "save_file", "save_model", "save_pretrained", "tofile", "dump", "export"}
# What ends so and puts other values in the place of weights, or none: it is meant to.
_NO_ARITHMETIC = {"requires_grad_", "copy_", "set_", "detach_", "resize_", "share_memory_"}
_NEW = {
    *("clone", "full_tensor", "deepcopy", "cpu", "to", "float", "double", "half", "bfloat16"),
    *("numpy", "zeros_like", "empty_like", "full_like", "ones_like", "stack", "cat"),
    *("get_model_state_dict", "get_state_dict"),
}


def exports_in_place(evidence: Evidence) -> Iterator[Place]:
    """The lines that do so, of functions that the survey run has reached and that make no step."""
    seen, sources = Seen.of(evidence).lines, evidence.sources
    survey = evidence.survey
    records = survey.all(Reached) if survey is not None else []
    trains = {(place.file, place.function) for one in records for place in one.stack}
    for file in sources.project:
        for function in functions(sources.tree(file)):
            calls = called(function)
            if (file, function.name) in trains or calls & _TRAINS or not calls & _WRITES:
                continue
            written = max(_lines_of(function, _WRITES))
            for node in walk(function):
                line = getattr(node, "lineno", 0)
                if _changes(node, function) and line < written and line in seen.get(file, ()):
                    code = sources.line(file, line)
                    yield Place(file=file, line=line, function=function.name, code=code)


def _lines_of(function: ast.FunctionDef, names: set[str]) -> list[int]:
    calls = (node for node in walk(function) if isinstance(node, ast.Call))
    return [node.lineno for node in calls if name_or_callee(node) in names]


def _changes(node: ast.AST, function: ast.FunctionDef) -> bool:
    """Whether a node computes in place, in memory that the function has not made itself."""
    match node:
        case ast.Call(func=ast.Attribute(value=target, attr=name)):
            in_place = name.endswith("_") and not name.endswith("__")
            return in_place and name not in _NO_ARITHMETIC and not _is_new(target, function)
        case ast.AugAssign(target=target):
            return not isinstance(node.value, ast.Constant) and not _is_new(target, function)
    return False


def _is_new(target: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether a function has made what it changes, as a copy or as the result of a computation."""
    if called(target) & _NEW:
        return True
    root = target
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        root = root.func if isinstance(root, ast.Call) else root.value
    if not isinstance(root, ast.Name):
        return True
    values = [
        node.value
        for node in walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(one, ast.Name) and one.id == root.id for one in node.targets)
    ]
    return any(called(one) & _NEW or not _is_part(one) for one in values)


def _is_part(value: ast.expr) -> bool:
    """Whether a value may be what was there before, and no number or result of an operation."""
    return isinstance(value, ast.Name | ast.Attribute | ast.Subscript | ast.Call)

"""Code that decides what is computed, sharded, saved or restored: calls of torch.distributed and
FSDP, checkpoints, precision, clips, the loss and the learning rate. Pure functions on syntax trees.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from .bound_names import name_or_callee
from .unreached_blocks import functions

_MODULES = (
    *("torch.distributed", "torch.amp", "torch.cuda.amp", "torch.autocast", "torch.compile"),
    *("torch.save", "torch.load", "torch.utils.checkpoint", "torch.nn.utils.clip_grad"),
    *("torch.bfloat16", "torch.float16", "torch.half", "safetensors", "torchao"),
)
_NAMES = {
    *("load_state_dict", "state_dict", "clip_grad_norm_", "clip_grad_value_", "compile"),
    *("bfloat16", "half", "no_sync", "set_requires_gradient_sync", "autocast", "GradScaler"),
    *("fully_shard", "MixedPrecisionPolicy", "backward", "requires_grad_", "set_epoch"),
}


class Decisive:
    """Finds such code in a project; a call of a function that has some is such code, too."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self._imported = {file: imported_names(tree) for file, tree in trees.items()}
        self._functions: set[str] = set()
        self._losses = {file: _losses(tree) for file, tree in trees.items()}
        bodies = [(file, node) for file, tree in trees.items() for node in functions(tree)]
        while found := {
            node.name
            for file, node in bodies
            if node.name not in self._functions and self._calls(file, node)
        }:
            self._functions |= found

    def within(self, file: str, code: ast.AST) -> bool:
        """Whether a piece of code has some."""
        losses = self._losses.get(file, set())
        return self._calls(file, code) or any(_sets(node, losses) for node in ast.walk(code))

    def _calls(self, file: str, code: ast.AST) -> bool:
        return any(self._is(self._imported.get(file, {}), node) for node in ast.walk(code))

    def _is(self, imported: Mapping[str, str], node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and name_or_callee(node) in self._functions:
            return True
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        if name_or_callee(node) in _NAMES:
            return True
        dotted = dotted_name(node, imported)
        return any(dotted == one or dotted.startswith(f"{one}.") for one in _MODULES)


def _losses(tree: ast.Module) -> set[str]:
    """The names of what backward is called on."""
    return {
        node.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "backward"
        and isinstance(node.value, ast.Name)
    }


def _sets(node: ast.AST, losses: set[str]) -> bool:
    """Whether a statement gives a loss another value, or a group another learning rate."""
    if not isinstance(node, ast.Assign | ast.AugAssign):
        return False
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        match target:
            case ast.Name(id=name) if name in losses:
                return True
            case ast.Subscript(slice=ast.Constant(value="lr")):
                return True
    return False


def imported_names(tree: ast.Module) -> dict[str, str]:
    """{name in the file: what it is}."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                found[name] = alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted_name(node: ast.AST, imported: Mapping[str, str]) -> str:
    """`torch.distributed.barrier` of `dist.barrier`; "" for what is not imported."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value, imported)):
        return f"{base}.{node.attr}"
    return ""

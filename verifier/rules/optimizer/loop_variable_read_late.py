import ast
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache

from ...analysis.syntax import called, names_read, walk
from ...source.events import hit_at
from ...source.flow_queries import text
from ...source.project import Module
from ..base import Flow, Hits, SourceRule

# Methods by which a loop keeps a function beyond its turn, so that it is called when the variable
# has its last value (exam round 6 v_04_layerwise_decay (missed: curves of learning rates in a
# list)).
_COLLECTS = frozenset({"append", "appendleft", "add", "insert", "setdefault"})
# Hooks that read the loop's variable are only certain to be one for each part where the loop walks
# the model's parts.
_MODEL_PARTS = frozenset(
    {"parameters", "named_parameters", "modules", "named_modules", "children", "named_children"}
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)
_FUNCTIONS = (ast.Lambda, ast.FunctionDef)


class LoopVariableReadLate(SourceRule):
    """A function that a loop makes for later keeps its own value of the loop's variable.

    Why: A lambda or an inner function reads a variable when it is called, not when it is made.
    Functions that a loop puts into a list, or registers as hooks, all see the value of the last
    turn: all groups get the learning rates of the last group, all hooks write the statistics of the
    last layer. Nothing fails.
    Wrong:
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        curves = []
        for depth in range(len(groups)):
            curves.append(lambda step: 0.8**depth)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, curves)
    Right:
        groups = [{"params": [p]} for p in model.parameters()]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        curves = []
        for depth in range(len(groups)):
            curves.append(lambda step, depth=depth: 0.8**depth)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, curves)
    Fix: Bind the value where the function is made: a default (`lambda step, depth=depth: ...`),
    `functools.partial`, or a function that takes it and returns the inner one.
    Source: huggingface/accelerate PR#4273 (found there by this rule);
    docs.python.org/3/faq/programming.html ("Why do lambdas defined in a loop with different values
    all return the same result?"); flake8-bugbear B023.
    """

    def detect(self, flow: Flow) -> Hits:
        # Only the project's own files: a library's closures are not the user's to fix.
        for module in (one for one in flow.project.modules if not one.installed):
            for line, name, function in _in_file(module):
                what = (
                    f"{function} reads `{name}` when it is called: all that this loop makes see its"
                    " last value"
                )
                yield what, hit_at("", "", module, line, "").location


@lru_cache(maxsize=4096)
def _in_file(module: Module) -> tuple[tuple[int, str, str], ...]:
    """(line, variable, text) of each such function of a file.

    Many scripts of a project share their files.
    """
    made = {
        word: [n for n, line in enumerate(module.lines, 1) if word in line]
        for word in ("lambda", "def ")
    }
    found = {
        (f.lineno, name): f for loop in _near(module.tree, made) for f, name in _read_late(loop)
    }
    return tuple((line, name, _text(function)) for (line, name), function in found.items())


def _near(node: ast.AST, made: dict[str, list[int]]) -> Iterator[ast.AST]:
    """The nodes of a tree, without those parts on whose lines no function is made within another
    statement.
    """
    above = [one.lineno for one in getattr(node, "decorator_list", ())]
    first, last = (
        min([getattr(node, "lineno", 1), *above]),
        getattr(node, "end_lineno", None) or sys.maxsize,
    )
    words = (
        {"lambda": first, "def ": first + 1}
        if not isinstance(node, ast.expr)
        else {"lambda": first}
    )
    if any(
        bisect_left(made[word], start) < bisect_right(made[word], last)
        for word, start in words.items()
    ):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _near(child, made)


def _text(function: ast.Lambda | ast.FunctionDef) -> str:
    return text(function) if isinstance(function, ast.Lambda) else f"`{function.name}`"


def _read_late(loop: ast.AST) -> Iterator[tuple[ast.Lambda | ast.FunctionDef, str]]:
    """The functions that a loop makes and keeps, each with the variable of the loop that it
    reads.
    """
    if isinstance(loop, _COMPREHENSIONS):
        variables = set().union(*(_bound(g.target) for g in loop.generators))
        kept = [loop.value if isinstance(loop, ast.DictComp) else loop.elt]
    elif isinstance(loop, ast.For) and not _used_at_once(loop):
        variables = _bound(loop)
        kept = [part for statement in loop.body for part in _kept(statement, loop)]
    else:
        return
    named = {n.name: n for n in walk(loop) if isinstance(n, ast.FunctionDef)}
    for node in kept:
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        for part in parts:
            function = named.get(part.id) if isinstance(part, ast.Name) else part
            if isinstance(function, _FUNCTIONS) and (late := _free(function) & variables):
                yield function, min(late)


def _used_at_once(loop: ast.For) -> bool:
    """Whether a turn may call what it makes, or be the last: it trains, or leaves the loop."""
    leaves = any(isinstance(n, ast.Break | ast.Return | ast.Yield) for n in _own(loop))
    # A loop that trains, draws or leaves may call what it makes within the same turn: the variable
    # still has its value then (pairs.yaml loop-variable-read-late (second pair)).
    return leaves or bool(called(loop) & {"backward", "step", "next"})


def _kept(statement: ast.stmt, loop: ast.For) -> Iterator[ast.expr]:
    """What a statement of a loop keeps beyond its turn: in a list or a mapping that only collects,
    or as a hook.
    """
    for node in _own(statement):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            holder: ast.expr | None = node.targets[0].value
            values: list[ast.expr] = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            hook = "register" in node.func.attr and "hook" in node.func.attr
            if not hook and node.func.attr not in _COLLECTS:
                continue
            if hook and not called(loop.iter) & _MODEL_PARTS:
                continue
            holder, values = None if hook else node.func.value, node.args
        else:
            continue
        # A list that the loop also reads may be used within the turn: only one that it only fills
        # is read late for certain.
        if holder is None or _count(loop, holder) <= 1:
            yield from values


def _count(loop: ast.AST, wanted: ast.AST) -> int:
    """How often an expression stands in a loop."""
    dumped = ast.dump(wanted)
    return sum(type(node) is type(wanted) and ast.dump(node) == dumped for node in walk(loop))


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """A tree without the functions that stand in it."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _FUNCTIONS):
            yield from _own(child)


def _bound(node: ast.AST) -> set[str]:
    """The variables that a turn of a loop sets anew."""
    return {n.id for n in _own(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _free(function: ast.Lambda | ast.FunctionDef) -> set[str]:
    """The variables of the surroundings that a function reads when it is called."""
    body: list[ast.AST] = [function.body] if isinstance(function, ast.Lambda) else [*function.body]
    given = {a.arg for a in walk(function.args) if isinstance(a, ast.arg)}
    own = set().union(
        *(
            {n.id for n in walk(b) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            for b in body
        )
    )
    return set().union(*map(names_read, body)) - given - own

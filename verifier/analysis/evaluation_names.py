"""Variables that a script assigns in its evaluations: by calls that switch gradients off."""

import ast
from collections.abc import Iterator

from ..evidence import Sources
from .decisive_names import read_in
from .syntax import called, functions, functions_of, last_name, walk

# The ways of torch to switch gradients off: they mark a function as an evaluation.
_WITHOUT_GRADIENTS = ("no_grad", "inference_mode", "set_grad_enabled")


def evaluations(sources: Sources) -> set[str]:
    """The names of functions that switch gradients off and run no backward, and of objects that are
    called like such functions.
    """
    training = leading_to(sources, "backward")
    quiet = {f for f in functions_of(sources) if _switches(f) and f.name not in training}
    trees = [sources.tree(file) for file in sources.project]
    classes = {
        cls.name
        for tree in trees
        for cls in walk(tree)
        # Evaluators may be objects with a `__call__` without gradients (exam round 6: evaluators
        # that are objects).
        if isinstance(cls, ast.ClassDef)
        and any(f in quiet and f.name == "__call__" for f in cls.body)
    }
    made = (n for tree in trees for n in walk(tree) if isinstance(n, ast.Assign))
    objects = {
        last_name(t)
        for n in made
        if isinstance(n.value, ast.Call) and called(n.value) & classes
        for t in n.targets
    }
    return {f.name for f in quiet} | objects


def leading_to(sources: Sources, name: str) -> set[str]:
    """This name, and those of the functions that call it, or call such a function."""
    calls = {f.name: called(f) for f in functions_of(sources)}
    found = {name}
    while more := {caller for caller, names in calls.items() if names & found} - found:
        found |= more
    return found


def _switches(node: ast.AST) -> bool:
    """Whether gradients are switched off in the decorators of a function, or in a statement."""
    return any(last_name(n) in _WITHOUT_GRADIENTS for n in walk(node))


def from_evaluations(tree: ast.Module, evaluations: set[str]) -> Iterator[tuple[str, str]]:
    """(function, expression) of what is assigned without gradients, from a call of one of these
    functions, or from such values.
    """
    top = [n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)]
    scopes = [("", top), *((function.name, function.body) for function in functions(tree))]
    for scope, body in scopes:
        inside = [n for stmt in body for n in walk(stmt)]
        for expression in _evaluated(inside, evaluations, scope in evaluations):
            yield ("" if expression.startswith("self.") else scope), expression


def _evaluated(inside: list[ast.AST], evaluations: set[str], whole: bool) -> set[str]:
    """What the nodes of one scope assign so; `whole`: the scope itself is an evaluation."""
    blocks = [
        n for n in inside if isinstance(n, ast.With) and any(_switches(item) for item in n.items)
    ]
    without = {id(n) for block in blocks for n in walk(block)}
    loops = [n for n in inside if isinstance(n, ast.For | ast.While)]
    looped = {id(n) for loop in loops for n in walk(loop)}
    stored = [n for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    # What was computed before the loop is as good as a constant: a distance to it is the
    # evaluation's (exam round 12, missed: a distance that the loop computes of samples and of a
    # constant).
    changing = {n.id for n in stored if id(n) in looped}
    steady = {n.id for n in stored} - changing
    assignments = [n for n in inside if isinstance(n, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    known: set[str] = set()
    # The second time finds what is assigned from what a later line of the loop assigns.
    for _ in range(2):
        for node in assignments:
            constants = steady if id(node) in looped else set()
            evaluated = whole or id(node) in without or called(node) & evaluations
            if node.value and (evaluated or _made_of(node.value, known, constants)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                known |= {text for target in targets for text in read_in(target)}
    return known


def _made_of(node: ast.expr | None, known: set[str], steady: set[str]) -> bool:
    """Whether an expression reads nothing but such values, beside modules, functions and what the
    loop around it does not assign.
    """
    nodes = list(walk(node)) if node is not None else []
    functions = {id(n.func) for n in nodes if isinstance(n, ast.Call)}
    names = {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in functions}
    return bool(names & known) and names <= known | steady | {
        "self",
        "torch",
        "math",
        "dist",
        "float",
    }

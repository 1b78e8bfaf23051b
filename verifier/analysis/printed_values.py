"""Which parts of a printed text show a value of the training loop that each rank has for itself,
such as its last loss.
"""

import ast
import builtins
import re
from collections.abc import Callable, Iterator
from functools import partial

from ..evidence import Sources
from ..trace import Run
from ..trace.events import Place, Reached
from .state import apart, states
from .syntax import last_name, walk

# `math.exp(loss)` shows the rank's own loss; a function of the script may have reduced it over
# ranks.
_PASSED_THROUGH = {
    "math",
    "torch",
    "np",
    "numpy",
}  # what their functions return is a value of their arguments
Loop = dict[str, set[int]]  # {file: lines of the loops in which steps are made}


def lines_of_loop(run: Run, sources: Sources) -> Loop:
    """The lines of the loops in which a survey run has made its first step."""
    stacks = [record.stack for record in run.all(Reached) if record.stack]
    found: Loop = {}
    for place in stacks[-1] if stacks else []:
        for node in walk(sources.tree(place.file)):
            if isinstance(node, ast.For | ast.While) and node.lineno <= place.line <= (
                node.end_lineno or 0
            ):
                found.setdefault(place.file, set()).update(
                    range(node.lineno, (node.end_lineno or 0) + 1)
                )
    return found


def without_own_values(
    text: str, places: list[Place], loop: Loop, run: Run, sources: Sources
) -> str | None:
    """A printed text without what may be of one rank only; None if that cannot be taken out.

    `run` has recorded the state of its loop.
    """
    for place in places:
        own = partial(
            _is_own,
            place.function,
            _assigned(sources.tree(place.file), loop.get(place.file, set())),
            run,
        )
        for call in _calls_on(sources.tree(place.file), place.line):
            for argument in call.args:
                if isinstance(argument, ast.JoinedStr):
                    text = _masked(text, argument, own)
                elif not isinstance(argument, ast.Constant) and own(argument):
                    return None
    return text


def _calls_on(tree: ast.AST, line: int) -> Iterator[ast.Call]:
    for node in walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and node.lineno <= line <= (node.end_lineno or 0)
        ):
            yield node.value


def _assigned(tree: ast.AST, lines: set[int]) -> set[str]:
    names = (
        node
        for node in walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    return {node.id for node in names if node.lineno in lines}


def _masked(text: str, formatted: ast.JoinedStr, own: Callable[[ast.expr], bool]) -> str:
    pattern, hidden = "", []
    for part in formatted.values:
        if isinstance(part, ast.Constant):
            pattern += re.escape(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            hidden.append(own(part.value))
            pattern += "(.*?)"
    found = re.search(f"{pattern}$", text, re.S)
    if found is None:
        return text
    for number in sorted((k for k, hide in enumerate(hidden, 1) if hide), reverse=True):
        text = f"{text[: found.start(number)]}~{text[found.end(number) :]}"
    return text


def _is_own(function: str, assigned: set[str], run: Run, value: ast.expr) -> bool:
    return any(_differs(name, function, name in assigned, run) for name in _roots(value))


def _roots(value: ast.AST) -> Iterator[str]:
    """The variables whose value an expression shows: not those that it gives to a function of the
    script.
    """
    if isinstance(value, ast.Name):
        yield value.id
    elif isinstance(value, ast.Call):
        name = last_name(_innermost(value.func))
        through = name in _PASSED_THROUGH or (
            isinstance(value.func, ast.Name) and hasattr(builtins, name)
        )
        for argument in [*value.args, *(k.value for k in value.keywords)] if through else []:
            yield from _roots(argument)
        if isinstance(value.func, ast.Attribute) and not through:
            yield from _roots(value.func.value)
    else:
        for child in ast.iter_child_nodes(value):
            yield from _roots(child)


def _innermost(value: ast.expr) -> ast.expr:
    """`a` of `a.b.c`."""
    return _innermost(value.value) if isinstance(value, ast.Attribute) else value


def _differs(name: str, function: str, assigned: bool, run: Run) -> bool:
    """Whether a variable, or a part of it, differs between ranks in the last step; if that was not
    recorded, whether the loop sets it.
    """
    last = [list(states(trace).values())[-1:] for trace in run.traces]
    first, *others = [found[0] if found else {} for found in last]
    variable = re.compile(rf"({re.escape(function)}\.)?{re.escape(name)}($|[.\[])")
    mine = [path for path in first if variable.match(path)]
    if not mine:
        # Where the ranks' values were not recorded, what the training loop sets may be one rank's
        # own (its last loss) (test_a_variable_that_the_ranks_have_for_themselves).
        return assigned
    return any(
        not first[path].sharded
        and any(path not in other or apart(first[path], other[path]) != 0.0 for other in others)
        for path in mine
    )

"""The numbers that evaluations return: which of them are those of all ranks, and may be held
against another run's.
"""

import ast
from collections import Counter
from dataclasses import dataclass

from ..evidence import Evidence, Sources
from ..trace import Run, Trace
from ..trace.events import UNKNOWN, Measured, Place
from .limits import nudged
from .syntax import functions_of, last_name, loops, walk

_SHOWS = {"print", "info", "log", "write"}
Key = tuple[int, str, str]  # step, function, path


@dataclass(frozen=True)
class Number:
    """A number that every rank has made alike."""

    value: float
    drew: str
    at_line: Place | None


def measured(run: Run, sources: Sources) -> dict[Key, Number]:
    """{(step, function, path): number} of the calls that made the same on all ranks: one rank's
    part is none.

    Left out: numbers of functions that one line calls again and again, such as for each batch, what
    depends on draws of a rank, whole numbers (counts, which are often a rank's own), and variables
    that a loop assigns.
    """
    ranks = [_of(trace) for trace in run.traces]
    found: dict[Key, Number] = {}
    for key, number in ranks[0].items() if ranks else ():
        alike = all(
            (one := other.get(key)) is not None
            # Evaluations that draw are compared only where ranks and both runs have drawn the same
            # numbers (exam round 12, missed: an evaluation whose data are drawn by seeded
            # generators).
            and (one.value, one.drew) == (number.value, number.drew)
            for other in ranks
        )
        # Whole numbers are counts, often a rank's own; what a loop assigns is its last batch's:
        # both differ in one process by right.
        if alike and not number.value.is_integer() and not _of_a_loop(sources, *key[1:]):
            found[key] = number
    return found


def of_both(mine: dict[Key, Number], theirs: dict[Key, Number]) -> list[Key]:
    """The numbers that two runs have made, from the same draws."""
    return sorted(key for key in mine.keys() & theirs.keys() if mine[key].drew == theirs[key].drew)


def noise(evidence: Evidence) -> dict[tuple[str, str], float]:
    """{(function, path): how far weights one unit in the last place apart move it}."""
    a, b = evidence.perturbed, nudged(evidence)
    found: dict[tuple[str, str], float] = {}
    if a is None or b is None:
        return found
    mine, theirs = measured(a, evidence.sources), measured(b, evidence.sources)
    for key in of_both(mine, theirs):
        found[key[1:]] = max(found.get(key[1:], 0.0), apart(mine[key].value, theirs[key].value))
    return found


def shown(sources: Sources, function: str, path: str) -> bool:
    """Whether a function prints or logs a variable of its own as it is."""
    return any(
        isinstance(node, ast.FormattedValue) and _plain(node.value) == path
        for one in functions_of(sources)
        if one.name == function.rpartition(".")[2]
        for call in walk(one)
        if isinstance(call, ast.Call) and last_name(call.func) in _SHOWS
        for node in walk(call)
    )


def _plain(value: ast.expr) -> str:
    """`loss` of `loss`, `loss.item()` and `float(loss)`."""
    match value:
        case ast.Name(id=name):
            return name
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="item"), args=[]):
            return name
        case ast.Call(func=ast.Name(id="float"), args=[ast.Name(id=name)]):
            return name
    return ""


def apart(a: float, b: float) -> float:
    """Difference of two numbers, relative to the larger."""
    return 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))


def _of(trace: Trace) -> dict[Key, Number]:
    records = [record for record in trace.of(Measured) if record.drew != UNKNOWN]
    calls = Counter((record.step, record.function, record.caller) for record in records)
    return {
        (record.step, record.function, path): Number(value, record.drew, record.at_line)
        for record in records
        # A function that one line calls for each batch has values of single batches: not the
        # evaluation's number.
        if calls[record.step, record.function, record.caller] == 1
        for path, value in record.values.items()
        # NaN and infinity have no difference that could be compared with a limit.
        if abs(value) < float("inf")
    }


def _of_a_loop(sources: Sources, function: str, path: str) -> bool:
    """Whether a path begins with a variable that a loop of the function assigns."""
    variable = path.partition("[")[0].partition(".")[0]
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == variable
        for one in functions_of(sources)
        if one.name == function.rpartition(".")[2]
        for loop in loops(one)
        for node in walk(loop)
    )

"""Whether ranks reached the lines at which the static tier saw something."""

import ast

from ..evidence import Evidence, Sources
from ..finding import Hit
from ..trace.events import Place, Visited
from .reached import Seen
from .steps_to_compare import steps_of
from .syntax import walk


def reached_hit(evidence: Evidence, hits: tuple[Hit, ...]) -> Hit | None:
    """The first of these places that a run may have reached; None if it is shown that none was."""
    return next((hit for hit in hits if not unreached(evidence, hit.location)), None)


def unreached(evidence: Evidence, place: Place) -> bool:
    """Whether runs that made steps show that no rank reached the statement at a place."""
    lines = _lines(evidence, place.file)
    if lines is None:
        return False
    first, last = _statement(evidence.sources, place)
    return lines.isdisjoint(range(first, last + 1))


def _lines(evidence: Evidence, file: str) -> set[int] | None:
    """The lines of a file that ranks reached; None where no run watched it to its end."""
    survey, train = evidence.survey, evidence.train
    # A run that was stopped, or crashed, may have come to other lines later.
    whole = survey is not None and survey.completed and steps_of(survey) > 0
    if whole and file in evidence.sources.project:
        return set(Seen.of(evidence).lines.get(file, ()))
    # a train run alone watches the lines that it was asked for (rules/base.lines_to_reach)
    if train is None or train.steps() == 0:
        return None
    asked = [record.lines[file] for record in train.all(Visited) if file in record.lines]
    return {line for lines in asked for line in lines} if asked else None


def _statement(sources: Sources, place: Place) -> tuple[int, int]:
    """The first and last line of the innermost statement at a place; of a compound one, of its
    head.
    """
    held = [
        (node.lineno, _last(node))
        for node in walk(sources.tree(place.file))
        if isinstance(node, ast.stmt) and node.lineno <= place.line <= _last(node)
    ]
    return max(held, default=(place.line, place.line))


def _last(node: ast.stmt) -> int:
    body = getattr(node, "body", None)
    last = node.end_lineno or node.lineno
    return max(node.lineno, body[0].lineno - 1) if body else last

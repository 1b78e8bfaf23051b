"""What of the project's code no run reached, or only the survey run, after the compared steps: what
a reviewer reads first stands first.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..evidence import Evidence
from ..source.bound_names import Names, bound_names, kinds_in, name_or_callee
from ..source.code_of_training import Decisive
from ..source.expression_sides import Choice, choices, span
from ..source.idle_code import Parents, is_idle, is_idle_side, only_ends
from ..source.unreached_blocks import Block, functions, is_there
from ..source.world_comparisons import fixed_choices, outcomes
from .reached import Seen, first_times
from .steps_to_compare import steps_of
from .syntax import names_set

_PART, _WHOLE = 60, 80  # characters of code that a side is shown with


@dataclass(frozen=True)
class Unreached:
    """Statements of the user's code that no run has reached, or that only the survey run has: after
    step `step`, not compared.

    `side`: the part of an expression that was not evaluated, in words; "" for whole statements.
    """

    file: str
    block: Block
    code: str
    step: int | None = None
    side: str = ""
    grade: int = 0  # the least is shown first


def unreached(evidence: Evidence) -> list[Unreached]:
    """What no run has reached, then what only the survey run has, after the last compared step; []
    where there was no survey.
    """
    survey = evidence.survey
    if survey is None or evidence.train is None:
        return []
    seen = Seen.of(evidence)
    compared, made = evidence.train.steps(), steps_of(survey)
    late = [one.window for one in evidence.windows if one.evidence is not None]
    found = [
        one
        for one in _Search(seen, evidence).found()
        if one.step is None or one.step > compared or one.step == compared < made
    ]
    found = [
        one
        for one in found
        # Step `step + 1` reached it, in a window that was compared.
        if one.step is None or not any(w.first <= one.step + 1 <= w.last for w in late)
    ]
    found = [one for one in found if not any(_implies(other, one) for other in found)]
    files = {file: number for number, file in enumerate(evidence.sources.project)}
    return sorted(
        found,
        key=lambda one: (one.step is not None, one.grade, files[one.file], one.block.first),
    )


def lines_of_a_resume(evidence: Evidence) -> dict[str, list[int]]:
    """{file: lines} that the survey run has not reached and a resume may: those that are listed
    otherwise, and the functions that are called there.
    """
    if evidence.survey is None:
        return {}
    never = [one for one in unreached(evidence) if one.step is None]
    found: dict[str, set[int]] = {}
    for one in never:
        found.setdefault(one.file, set()).update(range(one.block.first, one.block.last + 1))
    seen = Seen.by(evidence.survey).lines if never else {}
    for file, lines in seen.items():
        for node in functions(evidence.sources.tree(file)):
            own = range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
            if not any(line in lines for line in own):
                found.setdefault(file, set()).update(own)
    return {file: sorted(lines) for file, lines in found.items()}


def never_set(evidence: Evidence, names: Collection[str]) -> Unreached | None:
    """The first statements that would set a variable or an attribute of these names, and that no
    run has reached, the resume either.
    """
    for one in unreached(evidence) if evidence.resume is not None else ():
        if one.step is None and not one.side and names_set(one.block.body) & {*names}:
            return one
    return None


def _implies(one: Unreached, other: Unreached) -> bool:
    """Whether an item that was first reached after the same step is a part of another, or of a
    function that is called there.
    """
    if one is other or other.step is None or one.step != other.step:
        return False
    if one.file == other.file and one.block.first <= other.block.first <= one.block.last:
        return one.block.last - one.block.first > other.block.last - other.block.first
    calls = (node for stmt in one.block.body for node in ast.walk(stmt))
    return bool(other.block.function) and any(
        isinstance(node, ast.Call) and name_or_callee(node) == other.block.function
        for node in calls
    )


class _Search:
    """Looks for what was reached late or never, in all files of the project."""

    def __init__(self, seen: Seen, evidence: Evidence) -> None:
        self._seen, self._sources = seen, evidence.sources
        trees = {
            file: evidence.sources.tree(file)
            for file in seen.lines
            if file in evidence.sources.project
        }
        self._names = bound_names(trees)
        self._decisive = Decisive(trees)
        self._trees = trees
        made = [run.world_size for run in evidence.runs if run.steps() or run is evidence.survey]
        self._sizes = sorted({*made})

    def found(self) -> Iterator[Unreached]:
        """Statements, then sides of expressions, then comparisons of the number of ranks."""
        held: set[ast.AST] = set()  # conditions of what is found
        for file, block, step in first_times(self._seen, self._sources):
            names = self._names.get(file, {})
            if (
                step == 0
                or (step and only_ends(block.body))
                or is_idle(block, names)
                or self._taken_elsewhere(block, names)
            ):
                continue
            header = _header(block.within)
            held |= {*ast.walk(header)} if header is not None else set()
            code = self._code(file, block)
            if isinstance(block.within, ast.If) and block.body[0] in block.within.orelse:
                code = f"else of {code}"
            grade = self._grade(file, block.body, header)
            yield Unreached(file, block, code, step, grade=grade)
        for file, tree in self._trees.items():
            nodes = list(ast.walk(tree))
            parents = Parents(nodes)
            for choice in choices(nodes):
                for found in self._sides(file, choice, parents):
                    held |= {*ast.walk(choice.whole)}
                    yield found
            yield from self._comparisons(file, nodes, parents, held)

    def _sides(self, file: str, choice: Choice, parents: Parents) -> Iterator[Unreached]:
        """The sides of an expression that were not evaluated from the first step on."""
        known, names = self._seen.sides.get(file, {}), self._names[file]
        # An expression that was evaluated after a step has sides that cannot have been before.
        begun = known.get(span(choice.first))
        if begun is None:
            return
        for side in choice.sides:
            step = known.get(span(side))
            if step is not None and step <= begun:
                continue
            if is_idle_side(choice, side, parents, names, self._seen.lines[file]):
                continue
            block = Block(side.lineno, side.end_lineno or side.lineno)
            code = self._sources.line(file, side.lineno)
            text = (
                f"`{self._text(file, side, _PART)}` of `{self._text(file, choice.whole, _WHOLE)}`"
            )
            grade = 2 if is_there(side) else self._grade(file, (side,), choice.whole)
            yield Unreached(file, block, code, step, text, grade)

    def _comparisons(
        self, file: str, nodes: list[ast.AST], parents: Parents, held: set[ast.AST]
    ) -> Iterator[Unreached]:
        """What depends on the number of ranks, and came out the same in all runs."""
        names, lines = self._names[file], self._seen.lines[file]
        for node, value in fixed_choices(nodes, names, self._sizes):
            if node in held or node.lineno not in lines or parents.only_guards(node):
                continue
            sizes = [str(size) for size in self._sizes]
            ranks = " and ".join([", ".join(sizes[:-1]), sizes[-1]] if sizes[1:] else sizes)
            known = f"is always {value} on {ranks} ranks" if value else f"beyond {ranks} ranks"
            text = f"`{self._text(file, node, _WHOLE)}` {known}"
            code = self._sources.line(file, node.lineno)
            yield Unreached(
                file, Block(node.lineno, node.end_lineno or node.lineno), code, None, text, 1
            )

    def _taken_elsewhere(self, block: Block, names: Names) -> bool:
        """Whether the number of ranks of another run has led to these statements."""
        stmt = block.within
        if not isinstance(stmt, ast.If):
            return False
        return (block.body[0] in stmt.body) in outcomes(stmt.test, names, self._sizes)

    def _grade(self, file: str, code: tuple[ast.AST, ...], test: ast.expr | None) -> int:
        """0 for what decides what is trained or saved, 1 for what a launch chooses, else 2."""
        if any(self._decisive.within(file, one) for one in code):
            return 0
        chosen = test is not None and kinds_in(test, self._names[file]) & {
            "settings",
            "world",
            "device",
        }
        return 1 if chosen else 2

    def _code(self, file: str, block: Block) -> str:
        """The line that a block is named by; a condition of several lines whole."""
        at = block.under or block.first
        code, stmt = self._sources.line(file, at), block.within
        if isinstance(stmt, ast.If | ast.While) and stmt.lineno == at != stmt.test.end_lineno:
            return f"{code.split(' ')[0]} {self._text(file, stmt.test, _WHOLE)}:"
        return code

    def _text(self, file: str, node: ast.expr, most: int) -> str:
        """The code of an expression, on one line."""
        first, start, last, end = span(node)
        lines = self._sources.texts[file].splitlines()[first - 1 : last]
        parts = [line.encode() for line in lines]
        parts[-1] = parts[-1][:end]
        parts[0] = parts[0][start:]
        text = " ".join(b" ".join(parts).decode(errors="replace").split())
        return text if len(text) <= most else f"{text[: most - 3]}..."


def _header(stmt: ast.stmt | None) -> ast.expr | None:
    """The condition, iterable or subject that decides whether the parts of a statement run."""
    match stmt:
        case ast.If(test=found) | ast.While(test=found) | ast.Match(subject=found):
            return found
        case ast.For(iter=found) | ast.AsyncFor(iter=found):
            return found
    return None

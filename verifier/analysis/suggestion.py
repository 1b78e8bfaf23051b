"""How a script could be made to save and resume, from its own options and the conditions before
its save.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ..config.option import SAVE_AFTER, Option, settings, suggested
from ..evidence import Evidence
from ..source.bound_names import name_or_callee
from ..source.unreached_blocks import functions
from .reached import Seen

_DEEPEST = 4  # functions between the training loop and the save
Saves = set[tuple[str, int]]


def arguments(evidence: Evidence) -> tuple[str, str]:
    """What `--save-args` and `--resume-args` could be; ("", "") where no option shows it."""
    options = [one for one in declared(evidence) if one.settable]
    return suggested(options, gates(evidence, options))


def in_a_copy(evidence: Evidence) -> str:
    """Which keys of a TOML file would make the script save and resume, where no command line
    can set them; "" if there are none.
    """
    options = declared(evidence)
    files = [one for one in options if not one.settable]
    save, resume = settings(files)
    if not save or settings([one for one in options if one.settable])[0]:
        return ""
    name = PurePath(files[0].file).name
    again = f"; one with {', '.join(resume)} in --resume-args" if resume else ""
    return (
        f"for its checkpoints, name a copy of {name} with {', '.join(save)} in --save-args{again}"
    )


def declared(evidence: Evidence) -> list[Option]:
    """The options without those of parsers that no run has built: of another script's."""
    if evidence.survey is None:
        return list(evidence.options)
    lines = Seen.by(evidence.survey).lines
    return [
        one
        for one in evidence.options
        if not one.parsed or one.line in lines.get(one.file, (one.line,))
    ]


def gates(evidence: Evidence, options: Sequence[Option]) -> dict[str, str]:
    """{option that a condition before the script's save reads, where no run came there: it with a
    value, "" if none is known}.
    """
    if evidence.saving is None or evidence.survey is None:
        return {}
    found: dict[str, str] = {}
    for test in _conditions(evidence):
        for node, value in _asked(test):
            text = _dotted(node)
            for option in options:
                if text == option.key or text.endswith(f".{option.key}"):
                    found.setdefault(option.name, _with_value(option, value))
    return found


def _conditions(evidence: Evidence) -> Iterator[ast.expr]:
    """The tests of the branches that lead to the save, and that the survey run did not take."""
    sources, lines = evidence.sources, Seen.by(evidence.survey).lines if evidence.survey else {}
    trees = {file: sources.tree(file) for file in sources.project}
    saves = _leading(evidence, trees)
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.If):
                continue
            own = range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)
            leads = any(place == file and at in own for place, at in saves)
            if leads and not any(at in lines.get(file, ()) for at in own):
                yield node.test


def _leading(evidence: Evidence, trees: dict[str, ast.Module]) -> Saves:
    """The line of the save, and those that call the functions that it is in."""
    assert evidence.saving is not None
    saves: Saves = {(evidence.saving.file, evidence.saving.line)}
    for _ in range(_DEEPEST):
        names = {
            node.name
            for file, tree in trees.items()
            for node in functions(tree)
            if any(place == file and node.lineno <= at <= _end(node) for place, at in saves)
        }
        saves |= {
            (file, node.lineno)
            for file, tree in trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and name_or_callee(node) in names
        }
    return saves


def _asked(test: ast.expr) -> Iterator[tuple[ast.expr, str | None]]:
    """(what a condition wants to be true, or a number above 0 ("") or equal to a text)."""
    match test:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _asked(value)
        case ast.BinOp(op=ast.Mod(), right=right):
            yield right, ""
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=str(text))]):
            yield left, text
        case ast.Compare(left=ast.BinOp() as left, comparators=[ast.Constant()]):
            yield from _asked(left)
        case ast.Compare(
            left=left, ops=[ast.Gt() | ast.GtE() | ast.NotEq()], comparators=[ast.Constant()]
        ):
            yield left, ""
        case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            yield left, None
        case ast.Name() | ast.Attribute() | ast.Subscript():
            yield test, None


def _with_value(option: Option, value: str | None) -> str:
    """The option as the condition wants it; "" where its value is not known."""
    if option.purpose in ("steps", "size"):
        return ""
    if option.switch:
        return option.given("true")
    if value:
        return option.given(value)
    counts = value == "" or option.takes == "number" or option.default.isdigit()
    return option.given(str(SAVE_AFTER)) if counts and option.purpose in ("", "save") else ""


def _dotted(node: ast.expr) -> str:
    """`config.checkpoint.every` of a chain of attributes, or of keys."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))):
            return f"{_dotted(value)}.{name}"
    return ""


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno

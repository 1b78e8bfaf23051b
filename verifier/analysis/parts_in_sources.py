"""Where the sources have a part of a training, such as accumulation, and which option of the script
turns it on.

No verdict rests on it: it decides what a report says that no run did.
"""

import ast
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import Protocol

from ..config.option import Option, by_purpose
from ..config.parts import OPTIONS, Part
from ..evidence import Evidence
from ..source.code_of_training import dotted_name, imported_names
from ..trace.typed import Located
from .checkpoints import saves_by_option
from .reached import Seen
from .syntax import last_name

Line = tuple[str, int]
Lines = Mapping[str, Collection[int]]
Function = ast.FunctionDef | ast.AsyncFunctionDef

_ACCUMULATION = {
    "accum",
    "accumulation",
    "no_sync",
    "set_requires_gradient_sync",
    "set_is_last_backward",
}
_LOW = {"bfloat16", "float16", "bf16", "fp16", "autocast", "mixedprecisionpolicy"}
_EVALUATE = {"eval", "evaluate", "evaluation"}
_NAME: Mapping[type, str] = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}


_Scoped = tuple[ast.expr | ast.keyword, Function | None]


@dataclass(frozen=True)
class Mention:
    """A line of the project that has a part, and the innermost function that it is in; `loose`:
    only a word of a longer name says so.
    """

    file: str
    line: int
    function: Function | None
    loose: bool = False


def mentions(evidence: Evidence, part: Part) -> list[Mention]:
    """The lines of the project that have a part, in the order of its files; for a resume the line
    that loads, beside the one that saves.
    """
    if part in OPTIONS:
        saving = evidence.saving
        loads = (one for one in evidence.loading if saving is not None and one.file == saving.file)
        place = next(loads, saving) if part != "checkpoint" else saving
        return [] if place is None else [Mention(place.file, place.line, None)]
    has = _HAS.get(part)
    if has is None:
        return []
    sources = evidence.sources
    return [
        Mention(file, node.lineno, function, not has(node, sources.tree(file), whole=True))
        for file in sources.project
        for node, function in _nodes(sources.tree(file))
        if has(node, sources.tree(file))
    ]


def place_of(found: list[Mention], project: Sequence[str], lines: Lines) -> Line | None:
    """The line to name: in a function that a run entered, else in a file that one came to; None
    where no run came near it, as in another trainer of the same project.

    `lines`: those that runs reached, by file.
    """
    script = project[:1]
    near = [one for one in found if one.file in lines or one.file in script]

    def key(one: Mention) -> tuple[bool, bool, int, int]:
        body = one.function
        here = one.file in script if body is None else _entered(body, lines.get(one.file, ()))
        return not here, one.loose, project.index(one.file), one.line

    best = min(near, key=key, default=None)
    return (best.file, best.line) if best is not None else None


def lines_reached(evidence: Evidence) -> dict[str, set[int]]:
    """The lines that runs reached: all that the survey run saw, and those at which others recorded
    something.
    """
    found = {file: set(lines) for file, lines in Seen.of(evidence).lines.items()}
    runs = (run for run in (evidence.train, evidence.resume) if run is not None)
    for trace in (trace for run in runs for trace in run.traces):
        for place in (r.at_line for r in trace.records if isinstance(r, Located)):
            for line in (place, *place.callers) if place is not None else ():
                found.setdefault(line.file, set()).add(line.line)
    return found


def is_seen(file: str, evidence: Evidence) -> bool:
    """Whether the survey run would have seen a file if it had come to it: not one beside the
    folders of those that it saw, such as a library's.
    """
    if evidence.survey is None:
        return False
    seen = {*map(os.path.dirname, Seen.by(evidence.survey).lines)}
    return bool(seen) and PurePath(file).is_relative_to(os.path.commonpath(seen))


def option_of(evidence: Evidence, part: Part) -> str:
    """The option that makes a run do a part: one of the script, which turns it on; for
    checkpoints that of fsdp2, where the script has options to give there. "" if there is none.
    """
    if part in OPTIONS:
        known = evidence.course.resumes or "resume" in by_purpose(evidence.options)
        if part == "checkpoint":
            known = saves_by_option(evidence.options)
        return OPTIONS[part] if known else ""
    return next((one.shown for one in evidence.options if _turns_on(one, part)), "")


def _entered(function: Function, lines: Collection[int]) -> bool:
    last = function.end_lineno or function.lineno
    return any(function.body[0].lineno <= line <= last for line in lines)


@lru_cache(maxsize=256)
def _nodes(tree: ast.Module) -> list[_Scoped]:
    """The expressions, each with its innermost function; no decorators, which run where a module
    is imported.
    """
    found: list[_Scoped] = []
    left: list[tuple[ast.AST, Function | None]] = [(tree, None)]
    while left:
        node, function = left.pop()
        if isinstance(node, ast.expr | ast.keyword):
            found.append((node, function))
        decorators = getattr(node, "decorator_list", [])
        inner = node if isinstance(node, Function) else function
        children = [one for one in ast.iter_child_nodes(node) if one not in decorators]
        left += [(one, inner) for one in reversed(children)]
    return found


class _Has(Protocol):
    """Whether a node has a part; `whole`: not only by a word between underscores."""

    def __call__(self, node: ast.AST, tree: ast.Module, whole: bool = False) -> bool: ...


def _named(words: Collection[str]) -> _Has:
    """Whether a name, attribute or keyword is one of these words, or has one."""

    def has(node: ast.AST, tree: ast.Module, whole: bool = False) -> bool:
        name = str(getattr(node, _NAME.get(type(node), ""), "")).lower()
        return name in words or not (whole or set(name.split("_")).isdisjoint(words))

    return has


def _evaluates(node: ast.AST, tree: ast.Module, whole: bool = False) -> bool:
    """A call of `model.eval`, `evaluate` or `launch_eval`; not of Python's own function."""
    name = last_name(node.func) if isinstance(node, ast.Call) else ""
    if name == "eval":
        return isinstance(node, ast.Call) and not node.args
    words = set(name.lower().split("_"))
    return name == "evaluate" or not (whole or words.isdisjoint(_EVALUATE) or "literal" in words)


def _compiles(node: ast.AST, tree: ast.Module, whole: bool = False) -> bool:
    """Whether a node calls `torch.compile`, or the method `compile` of what is no module."""
    if not isinstance(node, ast.Call) or last_name(node.func) != "compile":
        return False
    name = dotted_name(node.func, _imports(tree))
    return name == "torch.compile" or (isinstance(node.func, ast.Attribute) and not name)


@lru_cache(maxsize=256)
def _imports(tree: ast.Module) -> dict[str, str]:
    return imported_names(tree)


_HAS: Mapping[Part, _Has] = {
    "accumulation": _named(_ACCUMULATION),
    "bf16": _named(_LOW),
    "compile": _compiles,
    "evaluation": _evaluates,
}

# The words of an option that turns a part on: one of the first, and no others than the second.
# `eval_packing`, `eval_dataset` and `checkpoint.eval.every` say how it is made.
_OFTEN = {"every", "interval", "freq", "frequency", "steps", "step", "iters", "n", "strategy"}
_ON = {"use", "enable", "enabled", "do", "with", "no", "skip", "disable", "train", "training"}
_SIZES = {"num", "grad", "gradient", "gradients", "micro", "batches", "size"}
_WORDS: Mapping[Part, tuple[set[str], set[str]]] = {
    "accumulation": ({"acc", "accum", "accumulate", "accumulation"}, {*_OFTEN, *_ON, *_SIZES}),
    "bf16": (
        {"bf16", "fp16", "precision", "dtype", "amp", "mixed"},
        {*_ON, "model", "param", "params", "compute", "torch", "type"},
    ),
    "compile": ({"compile"}, {*_ON, "model", "torch"}),
    "evaluation": (
        {"eval", "val", "validate", "evaluate", "validation"},
        {*_OFTEN, *_ON, "run", "loss", "epoch", "epochs", "check"},
    ),
}
# The words that name a part in options and conditions.
NAMES: Mapping[str, set[str]] = {part: own for part, (own, _) in _WORDS.items()}
_NUMBER = re.compile(r"[\d._]+")


def _turns_on(option: Option, part: Part) -> bool:
    """Whether an option looks as if it turned a part on: by its words, from the section that is
    about the part, and by what it takes.
    """
    own, others = _WORDS[part]
    sections = [set(re.split(r"[^a-z0-9]+", one)) for one in option.key.lower().split(".")]
    first = next((n for n, words in enumerate(sections) if words & own), None)
    if first is None or any("checkpoint" in words for words in sections[:first]):
        return False
    if not set().union(*sections[first:]) <= own | others:
        return False
    number = option.takes == "number" or bool(_NUMBER.fullmatch(option.default))
    takes = {"compile": False, "bf16": True, "evaluation": number or option.takes == "choice"}
    return option.switch or takes.get(part, number)

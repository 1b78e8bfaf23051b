"""What the runs did: the steps that were compared, on which numbers of ranks, and which parts of a
training some run did.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from ..config.parts import Part
from ..evidence import SAVES, Evidence, InWindow, Sources
from ..trace.events import Checkpoint, Evaluated
from .nonsmooth_steps import before_the_kink
from .precision import LOW, low_precision
from .reached import Seen
from .steps_to_compare import steps_of
from .survived_errors import Survived, survived
from .syntax import last_name, walk

Line = tuple[str, int]

# What names of a source say that it has a part. No verdict rests on them: they decide whether a
# report says that no run did it.
_ACCUMULATION = {
    "accum",
    "accumulation",
    "no_sync",
    "set_requires_gradient_sync",
    "set_is_last_backward",
}
_LOW = {"bfloat16", "float16", "bf16", "fp16", "autocast", "mixedprecisionpolicy"}
_OPTIONS: Mapping[Part, set[str]] = {
    "accumulation": {"accum", "accumulate", "accumulation"},
    "bf16": {"bf16", "fp16", "precision", "dtype", "amp", "mixed"},
    "compile": {"compile"},
    "evaluation": {"eval", "val", "validate"},
}
_NAME: Mapping[type, str] = {ast.Name: "id", ast.Attribute: "attr", ast.keyword: "arg"}


@dataclass(frozen=True)
class OnePart:
    """A part of a training: whether some run did it, the line of the sources that has it, and an
    option of the script that looks as if it turned it on.
    """

    done: bool
    line: Line | None = None
    option: str = ""

    @property
    def left_out(self) -> bool:
        """Whether the script has it, and no run did it."""
        return not self.done and self.line is not None


@dataclass(frozen=True)
class Coverage:
    """What was compared: steps 1 to `last` of the `made` that the survey run made (0 without one),
    which are all that there are if `whole`; one process up to step `alone`, if that is fewer.
    Behind `last` those windows were compared that have evidence.

    `ranks`: the world sizes of the runs, that of the train run first.
    """

    last: int
    alone: int | None
    windows: tuple[InWindow, ...]
    made: int
    whole: bool
    ranks: tuple[int, ...]
    parts: Mapping[Part, OnePart]
    caught: tuple[Survived, ...]


def coverage(evidence: Evidence, gpus: bool) -> Coverage | None:
    """What the runs did; None without a step of the train run.

    `gpus`: whether ranks computed on GPUs.
    """
    train, survey = evidence.train, evidence.survey
    if train is None or train.steps() == 0:
        return None
    kink = before_the_kink(evidence).kink
    sizes = dict.fromkeys(run.world_size for run in (train, *evidence.runs) if run.steps())
    parts = {name: _part(evidence, name) for name in _DONE}
    return Coverage(
        train.steps(),
        kink - 1 if kink is not None else None,
        evidence.windows,
        steps_of(survey) if survey is not None else 0,
        survey is not None and survey.completed,
        tuple(sizes),
        {**parts, "gpu": OnePart(gpus)},
        tuple(survived(survey, evidence.sources)),
    )


def _part(evidence: Evidence, name: Part) -> OnePart:
    lines = list(_LINES[name](evidence))
    first = min((line for line in lines if line[0] == lines[0][0]), default=None)
    words = _OPTIONS.get(name, set())
    options = (one.shown for one in evidence.options if not _words(one.name).isdisjoint(words))
    return OnePart(_DONE[name](evidence), first, next(options, ""))


def _words(option: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", option.lower()))


def _saves(evidence: Evidence) -> bool:
    ops = (*SAVES, "write")
    return any(record.op in ops for run in evidence.runs for record in run.all(Checkpoint))


def _accumulates(evidence: Evidence) -> bool:
    """Whether the first step of a run has several backwards."""
    firsts = (micros for run in evidence.runs for micros in run.micros(1))
    return any(len(micros) > 1 for micros in firsts)


def _in_low_precision(evidence: Evidence) -> bool:
    train = evidence.trained
    weights = any(entries[0].dtype in LOW for entries in train.parameters.values())
    return weights or low_precision(train) is not None


def _compiles(evidence: Evidence) -> bool:
    """Whether a line that compiles was reached; what torch then does is not recorded."""
    reached = Seen.of(evidence).lines
    return any(line in reached.get(file, ()) for file, line in _compile_calls(evidence))


_DONE: Mapping[Part, Callable[[Evidence], bool]] = {
    "checkpoint": _saves,
    "resume": lambda evidence: evidence.resume is not None and evidence.resume.steps() > 0,
    "reshard": lambda evidence: any(run.steps() for run in evidence.reshards),
    "accumulation": _accumulates,
    "bf16": _in_low_precision,
    "compile": _compiles,
    "evaluation": lambda evidence: bool(evidence.trained.all(Evaluated)),
}


def _saving_line(evidence: Evidence) -> Iterator[Line]:
    place = evidence.saving
    if place is not None:
        yield place.file, place.line


def _compile_calls(evidence: Evidence) -> Iterator[Line]:
    """Calls of `torch.compile` and of `Module.compile`."""
    for file, node in _nodes(evidence.sources):
        of_a_pattern = isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile"
        if isinstance(node, ast.Call) and last_name(node.func) == "compile" and not of_a_pattern:
            yield file, node.lineno


def _eval_calls(evidence: Evidence) -> Iterator[Line]:
    for file, node in _nodes(evidence.sources):
        if isinstance(node, ast.Call) and last_name(node.func) == "eval" and not node.args:
            yield file, node.lineno


def _named(words: Collection[str]) -> Callable[[Evidence], Iterator[Line]]:
    """The lines with a name, attribute or keyword that is one of these words, or has one between
    underscores.
    """

    def lines(evidence: Evidence) -> Iterator[Line]:
        for file, node in _nodes(evidence.sources):
            name = str(getattr(node, _NAME.get(type(node), ""), "")).lower()
            if name in words or not set(name.split("_")).isdisjoint(words):
                yield file, getattr(node, "lineno", 0)

    return lines


def _nodes(sources: Sources) -> Iterator[tuple[str, ast.AST]]:
    """(file, node) of the project's files, in their order."""
    return ((file, node) for file in sources.project for node in walk(sources.tree(file)))


_LINES: Mapping[Part, Callable[[Evidence], Iterator[Line]]] = {
    "checkpoint": _saving_line,
    "resume": _saving_line,
    "reshard": _saving_line,
    "accumulation": _named(_ACCUMULATION),
    "bf16": _named(_LOW),
    "compile": _compile_calls,
    "evaluation": _eval_calls,
}

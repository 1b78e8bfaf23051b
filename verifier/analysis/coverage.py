"""What the runs did: the steps that were compared, on which numbers of ranks, and which parts of a
training some run did.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..config.parts import OPTIONS, Part
from ..evidence import SAVES, Evidence, InWindow
from ..trace.events import Checkpoint, Compiled, Evaluated
from .nonsmooth_steps import before_the_kink
from .parts_in_sources import Line, Lines, is_seen, lines_reached, mentions, option_of, place_of
from .precision import LOW, low_precision
from .steps_to_compare import steps_of
from .survived_errors import Survived, survived
from .wording import count


@dataclass(frozen=True)
class OnePart:
    """A part of a training: whether some run did it, whether the sources have it, at which line
    near what runs reached, and an option that looks as if it turned it on.

    `tried`: how runs ended that should have done it, perhaps beside others that did; "" for none.
    """

    done: bool
    there: bool = False
    line: Line | None = None
    option: str = ""
    tried: str = ""

    @property
    def left_out(self) -> bool:
        """Whether the script has it, and no run did it."""
        return not self.done and self.there


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
    lines = lines_reached(evidence)
    parts = {name: _part(evidence, name, lines) for name in _DONE}
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


def _part(evidence: Evidence, name: Part, lines: Lines) -> OnePart:
    found = mentions(evidence, name)
    tried = _TRIED[name](evidence) if name in _TRIED else ""
    done = _DONE[name](evidence)
    if name in OPTIONS and found:
        line: Line | None = (found[0].file, found[0].line)
    else:
        line = place_of(found, evidence.sources.project, lines)
    # What only files have that the survey run saw none of, such as another trainer of the project,
    # the script has not (LLaMA-Factory: the evaluation of a DPO).
    there = line is not None or any(not is_seen(one.file, evidence) for one in found)
    return OnePart(done, there, line, option_of(evidence, name), tried)


def _saves(evidence: Evidence) -> bool:
    """Whether a run saved that is compared: what the survey run saves behind its last step, no rule
    on checkpoints judges.
    """
    ops, compared = (*SAVES, "write"), (r for r in evidence.runs if r is not evidence.survey)
    return any(record.op in ops for run in compared for record in run.all(Checkpoint))


def _accumulates(evidence: Evidence) -> bool:
    """Whether the first step of a run has several backwards."""
    firsts = (micros for run in evidence.runs for micros in run.micros(1))
    return any(len(micros) > 1 for micros in firsts)


def _in_low_precision(evidence: Evidence) -> bool:
    train = evidence.trained
    weights = any(entries[0].dtype in LOW for entries in train.parameters.values())
    return weights or low_precision(train) is not None


def _compiles(evidence: Evidence) -> bool:
    """Whether a run compiled a module, or called `torch.compile` where the project does: not by a
    decorator.
    """
    calls = {(one.file, one.line) for one in mentions(evidence, "compile")}
    records = [record for run in evidence.runs for record in run.all(Compiled)]
    called = {(place.file, place.line) for one in records if (place := one.at_line) is not None}
    return any(one.module for one in records) or not called.isdisjoint(calls)


def _stopped(evidence: Evidence) -> str:
    return "the run stopped" if evidence.resume is not None and not _resumes(evidence) else ""


def _resumes(evidence: Evidence) -> bool:
    return evidence.resume is not None and evidence.resume.steps() > 0


def _stopped_on(evidence: Evidence) -> str:
    """On which numbers of ranks a resume stopped before its first step."""
    sizes = [count(run.world_size, "rank") for run in evidence.reshards if not run.steps()]
    return f"on {' and '.join(sizes)}: the run stopped" if sizes else ""


_DONE: Mapping[Part, Callable[[Evidence], bool]] = {
    "checkpoint": _saves,
    "resume": _resumes,
    "reshard": lambda evidence: any(run.steps() for run in evidence.reshards),
    "accumulation": _accumulates,
    "bf16": _in_low_precision,
    "compile": _compiles,
    "evaluation": lambda evidence: bool(evidence.trained.all(Evaluated)),
}
_TRIED: Mapping[Part, Callable[[Evidence], str]] = {"resume": _stopped, "reshard": _stopped_on}

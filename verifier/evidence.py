"""The input of the rules: the runs of one verification, and why a run is missing."""

import ast
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from .config.option import Option
from .config.policy import Widening
from .config.watch import Watched
from .config.windows import Window
from .finding import Hit, Suppression, Uncovered
from .trace import Run
from .trace.events import Checkpoint, LoaderStarted, Place, Step
from .trace.roles import PLACES

NOT_QUICK = Uncovered("--quick does not make this run", "quick")


@dataclass(frozen=True)
class Sources:
    """Source files, each as it was when it was first read. Judging reads no other file.

    `texts`: {absolute path: text} of the project's files and of every file that a frame names;
    `project`: the project's own, the script first; `trees`: {text: its syntax tree} of what is
    parsed so far, handed on from one verification step to the next.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    project: tuple[str, ...] = ()
    trees: dict[str, ast.Module] = field(default_factory=dict, compare=False, repr=False)

    def line(self, file: str, number: int) -> str:
        """Line `number` (from 1) of a file, stripped; "" where there is none."""
        lines = self.texts.get(file, "").splitlines()
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""

    def tree(self, file: str) -> ast.Module:
        """The syntax tree of a file; an empty one if it cannot be parsed."""
        text = self.texts.get(file, "")
        if text not in self.trees:
            try:
                # Not read as Python before: a file that only a frame of a run names.
                self.trees[text] = ast.parse(text)
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                self.trees[text] = ast.Module(body=[], type_ignores=[])
        return self.trees[text]


@dataclass(frozen=True)
class Course:
    """How the runs have gone so far, for the plan: what was tried, and what the train run left in
    the files.
    """

    asked: bool = False  # whether the runs that the train run alone decides were made
    # modes in which a reference was tried: ddp, manual (all-reduce), alone
    ways: tuple[str, ...] = ()
    single_ways: tuple[str, ...] = ()  # and a single process: ddp, fsdp
    # the arguments with which a single process was given the batch of all ranks: () if none helped,
    # None before any were tried
    batch: tuple[str, ...] | None = None
    refused: Run | None = None  # the first reference, if it did not complete
    repeat: Run | None = None  # the train run again, ended after the save that is resumed from
    # a run with a rank killed in a save, from which nothing has resumed yet
    crashed: Run | None = None
    crashes_tried: tuple[dict[str, Any], ...] = ()  # the probe's options of each
    damages_tried: int = 0
    checkpoint: str = ""  # the folder of `{checkpoint}`
    left: tuple[str, ...] = ()  # what the train run left there, relative to it
    # what it wrote of the user's files: taken away, and given to runs that resume
    created: tuple[str, ...] = ()
    sizes_chosen: bool = False  # whether somebody asked for the other numbers of ranks
    resumes: bool = False  # whether somebody says how the script resumes
    stale: str = ""  # which checkpoint it loaded that was there before


@dataclass(frozen=True)
class InWindow:
    """The runs of a window, whose steps count from 1; None where they could not be made: `why`."""

    window: Window
    evidence: "Evidence | None"
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All runs, by their roles (trace/roles.py), and what is known beside them.

    `full_precision` is what the oracles are compared with: the train run, or its twin without mixed
    precision, autocast and dropout. `plain` is the script in its own dtype without dropout (the
    train run, or its twin), and `rounded_weights` the first step of the full-precision run from
    weights rounded to that dtype; only where there is low precision. `resume_full_precision` is
    what resharded runs are compared with: the train run itself, or a resume made in full precision.
    """

    survey: Run | None = None
    train: Run | None = None
    provoked: Run | None = None
    full_precision: Run | None = None
    plain: Run | None = None
    rounded_weights: Run | None = None
    reference: Run | None = None
    perturbed: Run | None = None
    original: Run | None = None
    scaled: Run | None = None
    layers: Run | None = None
    layers_reference: Run | None = None
    single: Run | None = None
    ending: Run | None = None
    ending_perturbed: Run | None = None
    resume: Run | None = None
    resume_full_precision: Run | None = None
    resumed_ending: Run | None = None
    inspect: Run | None = None
    reshards: tuple[Run, ...] = ()
    resharded_endings: tuple[Run, ...] = ()  # these, run to the end of the script
    # a run with a rank killed in a save, and the resume from what it left
    crashes: tuple[tuple[Run, Run], ...] = ()
    # resumes from a checkpoint with a fault of its own; the note of each says which
    damaged: tuple[Run, ...] = ()
    windows: tuple[InWindow, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    sources: Sources = field(default_factory=Sources)
    course: Course = field(default_factory=Course)
    saving: Place | None = None  # the first line of the sources that saves a checkpoint, run or not
    exporting: Place | None = None  # the same, if what `torch.save` writes is an export
    loading: tuple[Place, ...] = ()  # the lines of the sources that load
    # from where the static tier has come to the training by following the sources; "" if it has not
    followed: str = ""
    gradients: bool = False  # whether the sources touch gradients beside backward and zero_grad
    options: tuple[Option, ...] = ()  # the settings that the sources and configuration files show
    watch: tuple[Watched, ...] = ()  # values that somebody asked to compare
    # whether the script asked for CUDA, and had one that computes on the CPU
    cuda_on_cpu: bool = False
    # the step from which on one process is not compared (analysis/nonsmooth_steps.py)
    kink: int | None = None
    average: float | None = None  # the mean of 1 and 2 by gloo, where that was measured
    # by rule: what the static tier saw
    hits: Mapping[str, tuple[Hit, ...]] = field(default_factory=dict)
    # by rule: limits that a team has widened
    tolerances: Mapping[str, Widening] = field(default_factory=dict)
    suppressions: tuple[Suppression, ...] = ()  # the comments in the sources that ignore a rule

    def of_role(self, role: str) -> Run | None:
        """The run in a role; None if there is none, or if the role has several."""
        run = getattr(self, role, None)
        return run if isinstance(run, Run) else None

    def having(self, role: str, run: Run) -> Self:
        """This evidence with a run in a role."""
        changed: dict[str, Any] = {role: run}
        return replace(self, **changed)

    def times(self, rule: str) -> float:
        """The factor on the limit of a rule."""
        return self.tolerances[rule].times if rule in self.tolerances else 1.0

    @property
    def runs(self) -> list[Run]:
        """Every run there is, once, in the order of the table of roles."""
        several = {
            "reshard": self.reshards,
            "resharded_ending": self.resharded_endings,
            "crash": tuple(run for pair in self.crashes for run in pair),
            "damaged": self.damaged,
        }
        found: list[Run] = []
        for role in PLACES:
            one = self.of_role(role)
            for run in several.get(role, () if one is None else (one,)):
                if run not in found:
                    found.append(run)
        return found

    def saved_after(self, command: str = "") -> int | None:
        """The step of the checkpoint that the resume starts from: the one that its command names,
        else the last usable one.

        Usable is what the train run saved before its last step, if there is any RESUMED_STEPS
        before it. Where a later save hides the last one, so that the run is repeated up to it, it
        is the first of the second half, in an epoch: the resume sees more. In a script that saves
        through torch.distributed.checkpoint, a `torch.save` is an export and no checkpoint.
        `command`: that of the resume, as long as it has not been run.
        """
        if self.train is None:
            return None
        saves = [(r.op, r.after_step) for r in saves_of(self.train) if r.after_step > 0]
        every = [step for op, step in saves if op != "torch.save"] or [step for _, step in saves]
        found = [step for step in every if step < self.train.steps()]
        if (loaded := self._loaded()) is not None:
            return loaded
        early = [step for step in found if step <= self.train.steps() - RESUMED_STEPS]
        early = [step for step in early if step >= all_kinds_by(self.train)] or early
        named = named_checkpoint(
            self.train, command or (self.resume.command if self.resume is not None else "")
        )
        if named is not None and named[1] in found:
            return named[1]
        last = max(early or found, default=None)
        # an epoch: there a lost position in it does not show
        begins = {r.step - 1 for r in self.train.places(LoaderStarted)}
        half = [step for step in early if step >= self.train.steps() / 2]
        # cycles (of an average, an accumulation, an evaluation) end at steps of many divisors,
        # where their state does not show
        cycles = {step: sum(step % other == 0 for other in range(2, step)) for step in half}
        return (
            min(half, key=lambda step: (step in begins, cycles[step], step))
            if half and last != max(every)
            else last
        )

    def resumed_after(self) -> int | None:
        """How many steps of the train run come before the first one of the resumed run: those
        before its checkpoint.

        One more if the script updates its weights itself and the weights say so: an update before
        the first backward is not seen. Files of its own may hold an earlier step than that after
        which they were written; the weights say which. None: it is not known.
        """
        after = self.saved_after()
        first = self.resume.at_step(Step, 1) if self.resume is not None else []
        if after is None or self.train is None or not first:
            return after
        if all(save.op == "write" for save in saves_of(self.train)):
            weights = [record.weights for record in first]
            held = {
                k: [r.weights for r in self.train.at_step(Step, k)]
                for k in range(1, self.train.steps() + 1)
            }
            same = [k - 1 for k, values in held.items() if values == weights]
            return (
                after
                if same == [0]
                else min((k for k in same if k > 0), key=lambda k: abs(k - after), default=None)
            )
        if any(record.cls for record in first):
            return after
        begins = [
            [record.weights for record in self.train.at_step(Step, after + k)] for k in (1, 2)
        ]
        weights = [record.weights for record in first]
        return after + 1 if weights == begins[1] != begins[0] else after

    def _loaded(self) -> int | None:
        """The step of the checkpoint that the resumed run has loaded, if one path says it."""
        if self.train is None or self.resume is None:
            return None
        paths = {
            r.to
            for r in self.resume.places(Checkpoint)
            if r.op in ("load", "torch.load", "read") and r.to
        }
        last = (
            self.course.repeat.steps() if self.course.repeat is not None else self.train.steps() - 1
        )
        steps = {}
        for r in saves_of(self.train):
            if 0 < r.after_step <= last and (path := self.train.path_at_end(r.to, r.at)) in paths:
                steps[path] = r.after_step
        return steps.popitem()[1] if len(steps) == 1 else None

    @property
    def trained(self) -> Run:
        """The train run.

        Only for what comes after the precondition of a rule, which makes sure that there is one.
        """
        assert self.train is not None
        return self.train


FOLDER = "{checkpoint}"
RESUMED_STEPS = 3  # in which a resumed run is compared, where a save allows it
SAVES = ("save", "async_save", "torch.save")
LOADS = ("load", "torch.load", "set_model_state_dict", "set_state_dict", "read")


def named_checkpoint(train: Run, command: str) -> tuple[str, int] | None:
    """(path below the folder of `{checkpoint}`, step) of the one checkpoint that a command names
    literally; None if it names none.

    A folder that holds the checkpoints of several steps, or one that is overwritten at each, leaves
    the choice to the script.
    """
    saves = [(train.path_at_end(r.to, r.at), r.after_step) for r in saves_of(train) if r.to]
    for word in shlex.split(command):
        path = word.partition(FOLDER + "/")[2].strip("/")
        below = {step for place, step in saves if path and f"/{path}/" in f"{place}/"}
        exact = any(place.endswith(f"/{path}") for place, _ in saves)
        if len(below) == 1 and (exact or len({step for _, step in saves}) > 1):
            return path, below.pop()
    return None


def all_kinds_by(run: Run, most: int | None = None) -> int:
    """The step by which every kind of checkpoint was saved ("best" beside "last"), of those first
    saved by step `most`; 0 for none.

    Two paths are of one kind if they differ in their numbers only.
    """
    first: dict[str, int] = {}
    for record in saves_of(run):
        if record.after_step > 0:
            first.setdefault(re.sub(r"\d+", "#", record.to), record.after_step)
    usable = [
        step for step in first.values() if step <= (most or max(run.steps() - RESUMED_STEPS, 0))
    ]
    return max(usable, default=0)


def saved_from(run: Run, step: int, most: int) -> int:
    """The first step from `step` on after which something was saved, if there is one by step
    `most`; else 0.
    """
    return min(
        (r.after_step for r in saves_of(run) if max(step, 1) <= r.after_step <= most), default=0
    )


def marked_from(run: Run, step: int, most: int) -> int:
    """The step after which the script first writes a file of its own that was not there by `step`,
    where torch saves in the background: it marks that save as complete. 0 if there is none by step
    `most`.
    """
    records = run.places(Checkpoint)
    if not step or all(r.op != "async_save" for r in records):
        return 0
    written = [(re.sub(r"\d+", "#", r.to), r.after_step) for r in records if r.op == "write"]
    known = {path for path, after in written if after <= step}
    return min((after for path, after in written if path not in known and after <= most), default=0)


def saves_of(run: Run) -> list[Checkpoint]:
    """The saves of rank 0 through torch; without any, the files that the script itself writes below
    `{checkpoint}`.
    """
    records = run.places(Checkpoint)
    return [r for r in records if r.op in SAVES] or [r for r in records if r.op == "write"]

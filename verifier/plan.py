"""The runs of a verification as data: which runs are due, given the results of earlier ones. Pure functions; nothing is run here.

A stage is a function from the settings and the evidence so far to the runs that are due now. It is called until none is.
The executor sees only `PlannedRun`s.
"""

import shlex
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from .analysis.batch import whole_batch
from .analysis.checkpoints import named_paths, number_in, outside, saved_paths, saves_after, unwritten
from .analysis.crash_moments import moments
from .analysis.ending import both_end, comparable_end, last_step
from .analysis.first_run import clip_is_open, keeps_its_batch_on, several_models
from .analysis.horizon import LEAST, steps_to_compare, trains_before_sharding
from .analysis.precision import low_precision, needs_full_precision
from .analysis.reasons import RESUMED, missing, never_written, no_damage, no_resume
from .analysis.root_cause import root_cause
from .config.target import Target
from .errors import UserError
from .evidence import Evidence
from .judge import judge_one
from .launch.checkpoints import KINDS
from .launch.planned import PlannedRun
from .launch.processes import busy
from .launch.rehearsal import PER_NODE
from .rules import RULES
from .rules.base import lines_to_reach
from .trace import Run
from .trace.events import Inexact, ToEmpty

SIMULATED_STEPS = 2  # the first step of a run also initialises
FURTHER_STEPS = 20  # more steps are made, up to this many, to write the checkpoint that `--resume-args` names
SURVEYED = "starting_point.survey"
SURVEY_SECONDS = 30.0  # a longer script is ended; what it would have reached is not known
GRACE, CRASH_GRACE = 8.0, 3.0  # seconds that the other ranks get after the first has failed
UNEVEN = 3
MOST_RESHARDED = 10  # steps that are compared after a resume on other ranks: rounding is the larger the more there are
QUICK = frozenset({"train", "full_precision", "reference", "resume"})
NOT_QUICK = "--quick does not make this run"
AFTER_TRAIN = ("full_precision", "reference", "single", "original", "inspect", "provoked", *RESUMED)


@dataclass(frozen=True)
class Settings:
    """A target, and the rules that are to be judged on it."""

    target: Target
    chosen: Collection[str]
    tier: str = "ranks"
    original_distributed: bool = False  # whether the script that it was converted from knows of other ranks
    from_sharding_on: bool = False  # whether the script trains other models before it shards one, or prepares that one
    own_steps: str = ""  # where a step ends in a script that updates its weights itself (probe/events/own_updates.py)

    @property
    def needs(self) -> frozenset[str]:
        """The roles that the rules look at. What rules only read if it is there is made if all of them do."""
        rules = [RULES[name] for name in self.chosen]
        alone = all("resume" in rule.needs | rule.reads for rule in rules)
        needed = frozenset[str]().union(*(rule.needs | rule.reads if alone else rule.needs for rule in rules))
        return needed & QUICK if self.target.quick else needed

    def ordered(self, due: list[PlannedRun]) -> list[PlannedRun]:
        """Runs by how many of the rules need them, most first."""
        needs = [RULES[name].needs for name in self.chosen]
        return sorted(due, key=lambda run: -sum(run.role in roles for roles in needs))

    @property
    def steps(self) -> int:
        """How many steps are compared: as many as were asked for, or a few more where the checkpoint to resume from needs them."""
        target = self.target
        wanted = [n for path in named_paths(target.resume_args) if (n := number_in(path)) is not None]
        last, steps = max(wanted, default=0), target.steps or LEAST
        return last + 1 if steps <= last <= FURTHER_STEPS and self.needs & {*RESUMED} else steps

    def resumes_after(self, evidence: Evidence) -> int | None:
        """The step of the checkpoint from which the script is to resume."""
        return evidence.saved_after(shlex.join(self.target.resume_args))

    def run(self, role: str, world: int, *own: str, **fields: Any) -> PlannedRun:
        """A run of the target with arguments of its own after the common ones."""
        target = self.target
        same = {name: getattr(target, name) for name in ("script", "cwd", "module", "launcher", "timeout")}
        same |= {"steps": self.steps, "grace": min(GRACE, target.timeout), "arguments": (*target.args, *own)}
        asked = {"from_sharding_on": self.from_sharding_on, "own_steps": self.own_steps}
        probe: dict[str, Any] = {name: value for name, value in asked.items() if value}
        probe |= {"watch": [one.expression for one in target.watch]} if target.watch else {}
        if probe:
            same["probe"] = probe | fields.pop("probe", {})
        return PlannedRun(role, world, project=target.project, **{**same, **fields})

    def with_steps(self, evidence: Evidence) -> Self:
        """These settings with the number of steps that the survey run suggests, where none was asked for."""
        if self.target.steps or evidence.survey is None:
            return self
        resumes = bool(self.target.resume_args and self.needs & {*RESUMED})
        steps = steps_to_compare(evidence.survey, evidence.sources, resumes)
        waits = trains_before_sharding(evidence.survey)
        return replace(self, target=replace(self.target, steps=steps), from_sharding_on=waits)


Stage = Callable[[Settings, Evidence], list[PlannedRun]]


def survey(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The whole script, as far as its time allows: it says how many steps are worth comparing, and what no run reaches."""
    target = settings.target
    if target.steps or target.quick or evidence.survey is not None or evidence.train is not None:
        return []
    limit = min(SURVEY_SECONDS * busy(), target.timeout)
    fields = {"mode": "survey", "weights": SURVEYED, "timeout": limit, "optional": True}
    fields |= {"probe": {"leave_starting_point": True}}
    given = "--save-args" if target.save_args else "the arguments after `--`"
    expected = f"it is ended after {limit:.0f} s"
    return [settings.run("survey", target.nproc, *target.save_args, given=given, expected=expected, **fields)]


def first(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The train run, which saves its initial weights for the others; in the simulated tier, one process that acts as rank 0."""
    target = settings.target
    if evidence.train is not None:
        return []
    if settings.tier == "simulate":
        own: dict[str, Any] = {"mode": "simulate"}
        if target.full_size:
            own = {"mode": "rehearse", "starting_point": False, "probe": {"structure": True, "per_node": PER_NODE}}
        return [settings.run("simulate", target.nproc, steps=SIMULATED_STEPS, **own)]
    options: dict[str, Any] = {"leave_starting_point": True, "watch_saves": True}
    if lines := lines_to_reach(evidence, (RULES[name] for name in settings.chosen)):
        options["lines"] = lines
    given = "--save-args" if target.save_args else "the arguments after `--`"
    fields = {"files": "empty", "keeps": True, "given": given, "probe": options}
    return [settings.run("train", target.nproc, *target.save_args, **fields)]


def repeats(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The train run once more, ended after the save that is resumed from, where a later save would hide it."""
    train, after, target = evidence.train, settings.resumes_after(evidence), settings.target
    if not _trained(evidence) or evidence.course.repeat is not None or train is None or after is None:
        return []
    if not target.resume_args or not settings.needs & {*RESUMED} or not saves_after(train, after):
        return []
    if first := inspection(settings, evidence):
        return first  # the files of the train run, before they are those of another
    fields = {"steps": after, "files": "empty", "keeps": True, "starting_point": False}
    return [settings.run("repeat", target.nproc, *target.save_args, **fields)]


def oracles(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """Other ways to the same numbers, a look into the checkpoints, and the resumed runs: all that the train run alone decides."""
    train, needs, target = evidence.train, settings.needs, settings.target
    if train is None or evidence.course.asked:
        return []
    if not _trained(evidence):  # perhaps for what lay in memory
        return provoked(settings, evidence)
    exact = needs_full_precision(train)
    found = []
    if exact and "full_precision" in needs:
        found.append(settings.run("full_precision", target.nproc, probe={"full_precision": True}))
    if "reference" in needs:
        found.append(settings.run("reference", target.nproc, mode="ddp", probe={"full_precision": exact}))
    found += [_single(settings, exact, "ddp")] if "single" in needs else []
    found += _in_low_precision(settings, train)
    found += [_original(settings, exact)] if "original" in needs and target.reference else []
    found += [*provoked(settings, evidence), *inspection(settings, evidence)]
    if resumed := resumes(settings, evidence):
        found += [*resumed, *faults(settings, evidence, early=True)]
    return found


def provoked(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """A short run with fault injection: NaN in memory that `to_empty` allocates, huge gradients.

    Its completion is never judged. It is made only where it can show more than the train run.
    """
    train = evidence.train
    if "provoked" not in settings.needs or train is None:
        return []
    fill = bool(train.all(ToEmpty))
    clips = clip_is_open(evidence)
    if not fill and not clips:
        return []
    fields = {"steps": int(clips), "starting_point": False, "probe": {"fill": fill, "stress": clips}}
    expected = "fault injection: gradients or memory are changed"
    return [settings.run("provoked", settings.target.nproc, expected=expected, **fields)]


def inspection(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """A process of its own opens whatever the train run has saved."""
    paths = saved_paths(evidence.train) if evidence.train is not None else []
    if "inspect" not in settings.needs or not paths or evidence.inspect is not None:
        return []
    return [settings.run("inspect", 1, files="saved", opens=tuple(paths), arguments=(), starting_point=False)]


def resumes(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The script resumes: on the same ranks, and on other ranks."""
    target, train, after = settings.target, evidence.train, settings.resumes_after(evidence)
    if train is None or after is None or not settings.needs & {*RESUMED}:
        return []
    if no_resume(target.resume_args, settings.steps, evidence):
        return []
    if path := unwritten(target.resume_args, evidence.course.left):
        raise UserError(never_written(path, settings.steps, evidence))
    exact = needs_full_precision(train)

    def resumed(role: str, world: int, exact: bool, given: str = "--resume-args", optional: bool = False) -> PlannedRun:
        words = (*target.resume_args, *(target.reshard_args if role == "reshard" else ()))
        steps = min(settings.steps - after, MOST_RESHARDED if role != "resume" else settings.steps)
        fields = {"steps": steps, "files": "saved", "probe": {"full_precision": exact, "models": several_models(train)}}
        return settings.run(role, world, *words, given=given, optional=optional, starting_point=False, **fields)

    sizes = target.reshard_to if "reshard" in settings.needs else ()
    found = [resumed("resume", target.nproc, False)]
    found += [resumed("resume_full_precision", target.nproc, True)] if exact and sizes else []
    given = "--reshard-args" if target.reshard_args else ""
    found += [resumed("reshard", world, exact, given) for world in sizes]
    new = target.nproc != UNEVEN and UNEVEN not in sizes and not target.sizes_chosen
    if sizes and new and keeps_its_batch_on(UNEVEN, train):
        found.append(resumed("reshard", UNEVEN, exact, "", optional=True))
    return found


def fallbacks(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """Other ways to a reference and to a single process where the first did not complete."""
    if not _trained(evidence) or evidence.train is None:
        return []
    exact, reference, world = needs_full_precision(evidence.train), evidence.reference, settings.target.nproc
    found = []
    if reference is not None and not reference.completed:
        if "AttributeError" in root_cause(reference).error or "manual" in evidence.course.ways:
            # plain tensors cannot answer what the script asks: each rank shards over itself
            if "alone" not in evidence.course.ways:
                found.append(settings.run("reference", world, mode="alone", probe={"full_precision": exact}))
        else:  # graphs that DDP's reducer refuses, such as reentrant checkpointing
            found.append(settings.run("reference", world, mode="ddp", probe={"full_precision": exact, "by_hand": True}))
    if evidence.single is not None and not evidence.single.completed and "fsdp" not in evidence.course.single_ways:
        found.append(_single(settings, exact, "fsdp"))  # what DDP cannot stand in for, fully_shard on one rank may
    return found or _with_the_whole_batch(settings, evidence, exact)


def _with_the_whole_batch(settings: Settings, evidence: Evidence, exact: bool) -> list[PlannedRun]:
    """One process again, with the batch size of all ranks, where that is an option of the script."""
    target, train, single = settings.target, evidence.train, evidence.single
    if single is None or train is None or not single.completed or target.single_args or evidence.course.batch:
        return []
    if not (words := whole_batch(train, single, evidence.options, target.args)):
        return []
    again = _single(settings, exact, evidence.course.single_ways[-1])
    return [replace(again, arguments=(*again.arguments, *words), derived=True, note=shlex.join(words))]


def perturbed(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The reference once more, from weights one unit in the last place away, where a difference needs its noise as a tolerance."""
    train, course = evidence.train, evidence.course
    if not _trained(evidence) or train is None or evidence.perturbed is not None or "perturbed" not in settings.needs:
        return []
    rules, known = map(RULES.__getitem__, settings.chosen), completed(settings, evidence)
    if {judge_one(r, known).status for r in rules if "perturbed" in r.needs | r.reads} <= {"pass", "not_applicable"}:
        return []
    options = {"full_precision": needs_full_precision(train), "nudge": True, "by_hand": "manual" in course.ways}
    if evidence.reference is not None and not evidence.reference.completed:  # the noise of one process is the measure
        one = _single(settings, options["full_precision"], course.single_ways[-1] if course.single_ways else "ddp")
        return [replace(one, role="perturbed", probe=options | {"by_hand": False})]
    mode = "alone" if course.ways[-1:] == ("alone",) else "ddp"
    return [settings.run("perturbed", settings.target.nproc, mode=mode, probe=options)]


def endings(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """All steps in one process, where the survey shows what the script prints or writes behind them; where it differs, its noise."""
    target, course = settings.target, evidence.course
    doubted = judge_one(RULES["matches-single-process"], completed(settings, evidence)).status == "fail"
    comparable = comparable_end(evidence) or (doubted and both_end(evidence))
    if "ending" not in settings.needs or evidence.ending_perturbed is not None or not comparable:
        return []
    words = (*target.save_args, *target.single_args, *shlex.split("" if course.batch == "-" else course.batch))
    limit = min(2 * SURVEY_SECONDS * busy(), target.timeout)
    fields: dict[str, Any] = {"mode": course.single_ways[-1], "weights": SURVEYED, "timeout": limit, "optional": True}
    fields["expected"] = f"it is ended after {limit:.0f} s"
    if evidence.ending is None:
        return [settings.run("ending", 1, *words, probe={"ending": True}, **fields)]
    found = judge_one(RULES["ending-same-in-one-process"], completed(settings, evidence))
    if found.status != "fail":
        return []
    probe = {"ending": True, "nudge": True, "reseed_after": last_step(evidence)}
    return [settings.run("ending_perturbed", 1, *words, probe=probe, **fields)]


def faults(settings: Settings, evidence: Evidence, early: bool = False) -> list[PlannedRun]:
    """Runs with a fault in a save or a checkpoint, and the resumes after them.

    `early`: beside the resume from an intact checkpoint, without which they decide nothing, and which says what to damage. A script
    that writes elsewhere than to `{checkpoint}` finds what the crash left there only if nothing runs in between.
    """
    train, elsewhere = evidence.train, evidence.course.created
    if train is None or (elsewhere or outside(train, evidence.course.checkpoint) if early else no_damage(evidence)):
        return []
    crashed = _crash(settings, evidence, train) if "crash" in settings.needs else []
    damaged = _damaged(settings, evidence, train) if "damaged" in settings.needs and not early else []
    return (crashed or damaged) if elsewhere else [*crashed, *damaged]


def _crash(settings: Settings, evidence: Evidence, train: Run) -> list[PlannedRun]:
    """A rank is killed in a save, one moment after the other until one is met (with `--thorough` all); then the script resumes."""
    target, course = settings.target, evidence.course
    if course.crashed is not None:
        fields = {"steps": 1, "files": "left", "note": course.crashed.note, "starting_point": False}
        fields["probe"] = {"models": several_models(train)}
        return [settings.run("recovered", target.nproc, *target.resume_args, **fields)]
    found = []
    for moment in [] if evidence.crashes and not target.thorough else moments(train, target.thorough):
        fields = {"steps": moment.steps, "note": moment.note, "probe": {"watch_saves": True, "crash": moment.request}}
        fields |= {"leaves": True, "starting_point": False, "grace": min(CRASH_GRACE, target.timeout)}
        fields["expected"] = "fault injection: a rank is killed"
        found.append(settings.run("crash", target.nproc, *target.save_args, **fields))
    return found[course.crashes_tried :][:1]


def _damaged(settings: Settings, evidence: Evidence, train: Run) -> list[PlannedRun]:
    """The script resumes from a checkpoint with a damaged file."""
    target, paths = settings.target, tuple(saved_paths(train, evidence.saved_after()))
    fields = {"steps": 1, "files": "saved", "damaged": paths, "starting_point": False}
    fields |= {"expected": "fault injection: its checkpoint is damaged", "probe": {"models": several_models(train)}}
    kinds = (KINDS if target.thorough else KINDS[:1])[evidence.course.damages_tried :]
    return [settings.run("damaged", target.nproc, *target.resume_args, damage=kind, **fields) for kind in kinds[:1]]


def resumed_ending(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The resume once more, to the end of the script, where its first steps differ: perhaps they were only counted otherwise."""
    target, survey, rules = settings.target, evidence.survey, map(RULES.__getitem__, settings.chosen)
    if evidence.resumed_ending is not None or evidence.resume is None or survey is None or not survey.completed:
        return []
    known = completed(settings, evidence)
    if all(judge_one(r, known).status != "fail" for r in rules if r.about_the_resume and not r.beside_the_weights):
        return []
    fields = {"mode": "survey", "files": "saved", "starting_point": False, "optional": True}
    return [settings.run("resumed_ending", target.nproc, *target.resume_args, **fields)]


def last(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The measure of noise, which needs the reference, second looks, and what is left of the faults."""
    found = [*perturbed(settings, evidence), *endings(settings, evidence), *resumed_ending(settings, evidence)]
    return found if found and evidence.course.created else [*found, *faults(settings, evidence)]


def stages(tier: str) -> tuple[Stage, ...]:
    """The stages of a tier, in order."""
    return (first,) if tier == "simulate" else (survey, first, repeats, oracles, fallbacks, last)


def completed(settings: Settings, evidence: Evidence) -> Evidence:
    """The evidence with the reasons for runs that were not made, without faults that decide nothing."""
    target, train = settings.target, evidence.train
    if train is None or not _trained(evidence):
        what = "did not complete (see run-completes)" if train is not None and not train.completed else "made no step"
        found = dict.fromkeys(AFTER_TRAIN, f"the train run {what}")
    else:
        needs = {role for name in settings.chosen for role in RULES[name].needs}
        unmade = dict.fromkeys(needs - QUICK, NOT_QUICK) if target.quick else {}
        reshards = bool(target.reshard_to) or "reshard" not in settings.needs
        found = missing(evidence, target.resume_args, settings.steps, reshards, unmade)
    evidence = replace(evidence, missing=found)
    return replace(evidence, crashes=(), damaged=()) if no_damage(evidence) else evidence


def _trained(evidence: Evidence) -> bool:
    return evidence.train is not None and evidence.train.completed and evidence.train.steps() > 0


def _single(settings: Settings, exact: bool, mode: str) -> PlannedRun:
    words = settings.target.single_args
    fields = {"mode": mode, "given": "--single-args" if words else "", "probe": {"full_precision": exact}}
    return settings.run("single", 1, *words, **fields)


def _original(settings: Settings, exact: bool) -> PlannedRun:
    """The script that this one was converted from: on as many ranks if it is a distributed one, else on one."""
    target = settings.target
    script, *args = target.reference
    old = replace(settings, target=replace(target, script=Path(script), module="", args=tuple(args)))
    world = target.nproc if settings.original_distributed else 1
    return old.run("original", world, given="--reference", steps=settings.steps, probe={"full_precision": exact})


def _in_low_precision(settings: Settings, train: Run) -> list[PlannedRun]:
    """The script in its own dtype without dropout, and from weights rounded to that dtype, one step each."""
    dtype = low_precision(train)
    if dtype is None or "rounded_weights" not in settings.needs:
        return []
    dropout = any(r.what == "dropout" for r in train.all(Inexact))
    world = settings.target.nproc
    plain = [settings.run("undropped", world, steps=1, probe={"dropless": True})] if dropout else []
    return [*plain, settings.run("rounded_weights", world, steps=1, probe={"full_precision": True, "round_to": dtype})]

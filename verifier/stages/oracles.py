"""Runs that come to the same numbers in other ways, and resumes on as many and on other ranks."""

from dataclasses import replace
from pathlib import Path

from ..analysis.batch import whole_batch
from ..analysis.checkpoints import unwritten
from ..analysis.follow_up_runs import clip_is_open, for_a_resume, keeps_its_batch_on
from ..analysis.not_covered import lines_of_a_resume
from ..analysis.precision import low_precision, needs_full_precision
from ..analysis.root_cause import root_cause
from ..analysis.why_not_run import never_written, no_resume
from ..errors import UserError
from ..evidence import Evidence
from ..launch.planned import PlannedRun
from ..tolerances import MOST_RESHARDED
from ..trace import Run
from ..trace.events import Inexact, ToEmpty
from ..trace.roles import OF_CHECKPOINTS
from .faults import faults
from .settings import Settings, trained
from .train import inspection

# 3 divides few sizes evenly: shards and batches of other lengths show what 1, 2 and 4 ranks hide
# (faults of uneven shards).
UNEVEN = 3


def oracles(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """Other ways to the same numbers, a look into the checkpoints, and the resumed runs: all that
    the train run alone decides.
    """
    train, needs, target = evidence.train, settings.needs, settings.target
    if train is None or evidence.course.asked:
        return []
    # Even a train run that failed may have failed for what lay in memory after to_empty (meta
    # weights that nothing fills).
    if not trained(evidence):  # perhaps for what lay in memory
        return provoked(settings, evidence)
    exact = needs_full_precision(train)
    found = []
    if exact and "full_precision" in needs:
        found.append(settings.run("full_precision", target.nproc, probe={"full_precision": True}))
    if "reference" in needs:
        found.append(
            settings.run("reference", target.nproc, mode="ddp", probe={"full_precision": exact})
        )
    found += [in_one_process(settings, exact, "ddp")] if "single" in needs else []
    found += _in_low_precision(settings, train)
    found += [original(settings, exact)] if "original" in needs and target.reference else []
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
    fields = {
        "steps": int(clips),
        "starting_point": False,
        "probe": {"fill": fill, "stress": clips},
    }
    expected = "fault injection: gradients or memory are changed"
    return [settings.run("provoked", settings.target.nproc, expected=expected, **fields)]


def resumes(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The script resumes: on the same ranks, and on other ranks."""
    target, train, after = settings.target, evidence.train, settings.resumes_after(evidence)
    if train is None or after is None or not settings.needs & OF_CHECKPOINTS:
        return []
    if no_resume(target.resume_args, settings.steps, evidence):
        return []
    if path := unwritten(target.resume_args, evidence.course.left):
        raise UserError(never_written(path, settings.steps, evidence))
    exact = needs_full_precision(train)

    def resumed(
        role: str, world: int, exact: bool, given: str = "--resume-args", optional: bool = False
    ) -> PlannedRun:
        words = (*target.resume_args, *(target.reshard_args if role == "reshard" else ()))
        steps = min(settings.steps - after, MOST_RESHARDED if role != "resume" else settings.steps)
        probe = {"full_precision": exact, **for_a_resume(train, after)}
        if role == "resume" and (lines := lines_of_a_resume(evidence)):
            probe["lines"] = lines
        fields = {"steps": steps, "files": "saved", "probe": probe}
        return settings.run(
            role, world, *words, given=given, optional=optional, starting_point=False, **fields
        )

    sizes = target.reshard_to if "reshard" in settings.needs else ()
    found = [resumed("resume", target.nproc, False)]
    found += [resumed("resume_full_precision", target.nproc, True)] if exact and sizes else []
    given = "--reshard-args" if target.reshard_args else ""
    found += [resumed("reshard", world, exact, given) for world in sizes]
    # A size that nobody asked for is tried only beside the defaults, and is optional: exam round
    # 1's scripts need not run on 3.
    new = target.nproc != UNEVEN and UNEVEN not in sizes and not target.sizes_chosen
    if sizes and new and keeps_its_batch_on(UNEVEN, train):
        found.append(resumed("reshard", UNEVEN, exact, "", optional=True))
    return found


def fallbacks(settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """Other ways to a reference and to a single process where the first did not complete."""
    if not trained(evidence) or evidence.train is None:
        return []
    exact, reference, world = (
        needs_full_precision(evidence.train),
        evidence.reference,
        settings.target.nproc,
    )
    found = []
    if reference is not None and not reference.completed:
        # Plain tensors lack what the script asks of DTensors: each rank shards over itself instead
        # (accelerate and other libraries for which DDP cannot stand in).
        if "AttributeError" in root_cause(reference).error or "manual" in evidence.course.ways:
            # plain tensors cannot answer what the script asks: each rank shards over itself
            if "alone" not in evidence.course.ways:
                found.append(
                    settings.run("reference", world, mode="alone", probe={"full_precision": exact})
                )
        else:  # graphs that DDP's reducer refuses, such as reentrant checkpointing
            found.append(
                settings.run(
                    "reference", world, mode="ddp", probe={"full_precision": exact, "by_hand": True}
                )
            )
    if (
        evidence.single is not None
        and not evidence.single.completed
        and "fsdp" not in evidence.course.single_ways
    ):
        # what DDP cannot stand in for, fully_shard on one rank may
        found.append(in_one_process(settings, exact, "fsdp"))
    return found or _with_the_whole_batch(settings, evidence, exact)


def _with_the_whole_batch(settings: Settings, evidence: Evidence, exact: bool) -> list[PlannedRun]:
    """One process again, with the batch size of all ranks, where that is an option of the
    script.
    """
    target, train, single = settings.target, evidence.train, evidence.single
    if (
        single is None
        or train is None
        or not single.completed
        or target.single_args
        or evidence.course.batch is not None
    ):
        return []
    if not (words := whole_batch(train, single, evidence.options, target.args)):
        return []
    again = in_one_process(settings, exact, evidence.course.single_ways[-1])
    return [replace(again, arguments=(*again.arguments, *words), derived=tuple(words))]


def in_one_process(settings: Settings, exact: bool, mode: str) -> PlannedRun:
    words = settings.target.single_args
    fields = {
        "mode": mode,
        "given": "--single-args" if words else "",
        "probe": {"full_precision": exact},
    }
    return settings.run("single", 1, *words, **fields)


def original(settings: Settings, exact: bool) -> PlannedRun:
    """The script that this one was converted from: on as many ranks if it is a distributed one,
    else on one.
    """
    target = settings.target
    script, *args = target.reference
    old = replace(
        settings, target=replace(target, script=Path(script), module="", args=tuple(args))
    )
    world = target.nproc if settings.original_distributed else 1
    return old.run(
        "original",
        world,
        given="--reference",
        steps=settings.steps,
        probe={"full_precision": exact},
    )


def _in_low_precision(settings: Settings, train: Run) -> list[PlannedRun]:
    """The script in its own dtype without dropout, and from weights rounded to that dtype, one step
    each.
    """
    dtype = low_precision(train)
    if dtype is None or "rounded_weights" not in settings.needs:
        return []
    dropout = any(r.what == "dropout" for r in train.all(Inexact))
    world = settings.target.nproc
    plain = [settings.run("undropped", world, steps=1, probe={"dropless": True})] if dropout else []
    return [
        *plain,
        settings.run(
            "rounded_weights", world, steps=1, probe={"full_precision": True, "round_to": dtype}
        ),
    ]

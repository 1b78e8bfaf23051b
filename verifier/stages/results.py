"""What runs that have ended add to the evidence."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..analysis.batch import takes_the_same
from ..analysis.checkpoints import loaded_before
from ..analysis.precision import needs_full_precision
from ..evidence import Evidence
from ..execute import Made
from ..isolation.worlds import Worlds
from ..trace import Run
from ..trace.events import Killed
from ..trace.roles import ROLES


def added(evidence: Evidence, made: Sequence[Made], files: Worlds) -> Evidence:
    """The evidence with these runs."""
    if not all(ROLES[one.planned.role].before_oracles for one in made):
        evidence = replace(evidence, course=replace(evidence.course, asked=True))
    for one in made:
        if one.run is None:
            evidence = _without_run(evidence, one)
        elif one.planned.role in ("crash", "recovered", "damaged"):
            evidence = _with_fault(evidence, one, one.run, files)
        elif one.planned.role == "train":
            evidence = _with_train(evidence, one, one.run, files)
        else:
            evidence = _with_run(evidence, one, one.run)
    return evidence


def without_metadata(path: str) -> bool:
    """Whether a folder is no checkpoint of torch.distributed.checkpoint."""
    return Path(path).is_dir() and not Path(path, ".metadata").exists()


def _with_train(evidence: Evidence, made: Made, run: Run, files: Worlds) -> Evidence:
    home = str(files.checkpoint)
    course = replace(
        evidence.course,
        checkpoint=home,
        left=files.listing(),
        created=made.wrote,
        stale=loaded_before(run, (home, *made.wrote), without_metadata),
    )
    evidence = replace(evidence.having("train", run), course=course)
    if not needs_full_precision(run):
        evidence = evidence.having("full_precision", run)
    return evidence.having("resume_full_precision", run)


def _with_run(evidence: Evidence, made: Made, run: Run) -> Evidence:
    planned, course = made.planned, evidence.course
    if run.role == "repeat":
        return replace(evidence, course=replace(course, repeat=run))
    if run.role == "reference":
        way = "manual" if planned.probe.get("by_hand") else planned.mode
        refused = course.refused if run.completed or way == "alone" else run
        evidence = replace(
            evidence, course=replace(course, ways=(*course.ways, way), refused=refused)
        )
        return evidence.having("reference", run) if run.completed or way != "alone" else evidence
    if planned.derived and evidence.train is not None:
        same = takes_the_same(evidence.train, run)
        course = replace(course, batch=planned.derived if same else ())
        evidence = replace(evidence, course=course)
        return evidence.having("single", run) if same else evidence
    if run.role == "single":
        ways = (*course.single_ways, planned.mode)
        evidence = replace(evidence, course=replace(course, single_ways=ways))
    if run.role == "rounded_weights" and evidence.plain is None and evidence.train is not None:
        evidence = evidence.having("plain", evidence.train)
    if run.role == "reshard":
        counts = run.completed or not planned.optional
        return replace(evidence, reshards=(*evidence.reshards, run)) if counts else evidence
    if run.role == "resharded_ending":
        return replace(evidence, resharded_endings=(*evidence.resharded_endings, run))
    return evidence.having(ROLES[run.role].place or run.role, run)


def _with_fault(evidence: Evidence, made: Made, run: Run, files: Worlds) -> Evidence:
    """The evidence with a run with a fault in a save or a checkpoint, or the resume after it."""
    course = evidence.course
    if run.role == "crash":
        killed = run.all(Killed)
        kept = replace(run, left=files.listing(left=True)) if killed else None
        tried = (*course.crashes_tried, made.planned.probe["crash"])
        return replace(evidence, course=replace(course, crashes_tried=tried, crashed=kept))
    if run.role == "recovered" and course.crashed is not None:
        pairs = (*evidence.crashes, (course.crashed, run))
        return replace(evidence, crashes=pairs, course=replace(course, crashed=None))
    course = replace(course, damages_tried=course.damages_tried + 1)
    return replace(evidence, damaged=(*evidence.damaged, run), course=course)


def _without_run(evidence: Evidence, made: Made) -> Evidence:
    """A run whose files could not be brought into their state: its role is missing, for that
    reason.
    """
    course, role = evidence.course, made.planned.role
    if role == "damaged":
        return replace(evidence, course=replace(course, damages_tried=course.damages_tried + 1))
    unprepared = made.planned.files == "saved" and not made.unpaid
    roles = (role, "saved") if unprepared else (role,)
    return replace(evidence, missing=evidence.missing | dict.fromkeys(roles, made.trouble))

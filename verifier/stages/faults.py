"""Runs with a fault in a save or a checkpoint, and the resumes after them."""

from ..analysis.checkpoints import outside, saved_paths
from ..analysis.crash_moments import moments
from ..analysis.follow_up_runs import for_a_resume
from ..analysis.why_not_run import no_damage
from ..evidence import Evidence
from ..launch.checkpoints import KINDS
from ..launch.planned import PlannedRun
from ..tolerances import CRASH_GRACE
from ..trace import Run
from .settings import Settings


def faults(settings: Settings, evidence: Evidence, early: bool = False) -> list[PlannedRun]:
    """Runs with a fault in a save or a checkpoint, and the resumes after them.

    `early`: beside the resume from an intact checkpoint, without which they decide nothing, and
    which says what to damage.
    """
    train, course = evidence.train, evidence.course
    if train is None or (
        outside(train, course.checkpoint, course.created) if early else no_damage(evidence)
    ):
        return []
    crashed = _crash(settings, evidence, train) if "crash" in settings.needs else []
    damaged = (
        _damaged(settings, evidence, train) if "damaged" in settings.needs and not early else []
    )
    return [*crashed, *damaged]


def _crash(settings: Settings, evidence: Evidence, train: Run) -> list[PlannedRun]:
    """A rank is killed in a save, one moment after the other until one is met (with `--thorough`
    all), and in what the script does around its saves; after each the script resumes.
    """
    target, course = settings.target, evidence.course
    if course.crashed is not None:
        fields = {"steps": 1, "files": "left", "note": course.crashed.note, "starting_point": False}
        fields["probe"] = for_a_resume(train, course.crashed.steps())
        return [settings.run("recovered", target.nproc, *target.resume_args, **fields)]
    for moment in moments(train, target.thorough, course.checkpoint):
        enough = evidence.crashes and not target.thorough and not moment.beside
        if enough or moment.request in course.crashes_tried:
            continue
        fields = {
            "steps": moment.steps,
            "note": moment.note,
            "probe": {"watch_saves": True, "crash": moment.request},
        }
        fields |= {
            "leaves": True,
            "starting_point": False,
            "grace": min(CRASH_GRACE, target.timeout),
        }
        fields["expected"] = "fault injection: a rank is killed"
        return [settings.run("crash", target.nproc, *target.save_args, **fields)]
    return []


def _damaged(settings: Settings, evidence: Evidence, train: Run) -> list[PlannedRun]:
    """The script resumes from a checkpoint with a damaged file."""
    target, paths = settings.target, tuple(saved_paths(train, evidence.saved_after()))
    fields = {"steps": 1, "files": "saved", "damaged": paths, "starting_point": False}
    fields |= {"expected": "fault injection: its checkpoint is damaged"}
    fields |= {"probe": for_a_resume(train, evidence.saved_after())}
    kinds = (KINDS if target.thorough else KINDS[:1])[evidence.course.damages_tried :]
    return [
        settings.run("damaged", target.nproc, *target.resume_args, damage=kind, **fields)
        for kind in kinds[:1]
    ]

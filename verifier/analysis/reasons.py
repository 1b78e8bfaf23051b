"""Why a script cannot be resumed, or its checkpoints cannot be damaged, as reports state it."""

import shlex
from collections.abc import Sequence

from ..evidence import Evidence
from .checkpoints import outside, same_weights_after, unseen_save


def no_resume(resume_args: Sequence[str], steps: int, evidence: Evidence) -> str:
    """Why the script cannot be resumed with these arguments, or ""."""
    train, after = evidence.train, evidence.saved_after(shlex.join(resume_args))
    if evidence.course.stale:
        return evidence.course.stale
    if reason := unseen_save(evidence):
        return reason
    if not resume_args:
        return "the arguments with which this script resumes are not known: give --resume-args"
    if after is None:
        last = steps - 1
        return f"no save was seen before step {steps}: give --save-args that save after one of the steps 1 to {last}"
    repeat = evidence.course.repeat
    if repeat is not None and train is not None and not same_weights_after(repeat, train, after):
        return f"the script also saves after step {train.steps()}, and is not reproducible: save less often"
    if "saved" in evidence.missing:
        return f"the files of the train run in {{checkpoint}} cannot be copied: {evidence.missing['saved']}"
    return ""


def no_damage(evidence: Evidence) -> str:
    """Why its checkpoints cannot be damaged, or ""."""
    if evidence.train is None or evidence.resume is None:
        return evidence.missing.get("resume", "the script was not resumed")
    if not evidence.resume.completed:
        return "the script does not resume from an intact checkpoint"
    path = outside(evidence.train, evidence.course.checkpoint, evidence.course.created)
    return f"the script saves to {path}, outside {{checkpoint}}" if path else ""


def never_written(path: str, steps: int, evidence: Evidence) -> str:
    """The message on a checkpoint that `--resume-args` names and the train run did not write."""
    tops = sorted({item.partition("/")[0] for item in evidence.course.left})
    there = ", ".join(f"{{checkpoint}}/{name}" for name in tops[:5]) or "nothing"
    return (
        f"--resume-args names {{checkpoint}}/{path}, which the train run of {steps} steps did not write; it wrote {there}. "
        "Name one of these, save earlier (--save-args), or compare more steps (--steps)"
    )

"""Why runs were not made: a script cannot be resumed, its checkpoints cannot be damaged; as reports
state it.
"""

import re
import shlex
from collections.abc import Mapping, Sequence

from ..evidence import Evidence
from ..finding import Uncovered
from ..trace.roles import OF_CHECKPOINTS
from .checkpoints import outside, same_weights_after, unseen_save
from .root_cause import root_cause


def missing(
    evidence: Evidence,
    resume_args: Sequence[str],
    steps: int,
    reshards: bool,
    unmade: Mapping[str, str],
) -> dict[str, str]:
    """{role: why there is no run in it}, after a train run.

    `reshards`: whether other world sizes were asked for, where rules need them.
    """
    found, course = evidence.missing | {**unmade}, evidence.course
    if (
        "alone" in course.ways
        and course.refused is not None
        and evidence.reference
        and evidence.reference.completed
    ):
        found |= {"ddp": text} if (text := root_cause(course.refused).text) else {}
    if reason := no_resume(resume_args, steps, evidence):
        return found | dict.fromkeys(OF_CHECKPOINTS, reason)
    if not reshards:
        found["reshard"] = Uncovered(
            "no other world size was requested: pass --reshard-to", "reshard"
        )
    if reason := no_damage(evidence):
        return found | dict.fromkeys(("crash", "damaged"), reason)
    if not evidence.crashes:
        reason = (
            "no save could be interrupted (the script saves through neither DCP nor torch.save)"
        )
        found.setdefault("crash", Uncovered(reason, "an interrupted save"))
    if not evidence.damaged:
        found.setdefault(
            "damaged", Uncovered("no file of the last save was found", "a damaged save")
        )
    return found


def no_resume(resume_args: Sequence[str], steps: int, evidence: Evidence) -> str:
    """Why the script cannot be resumed with these arguments, or ""."""
    train, after = evidence.train, evidence.saved_after(shlex.join(resume_args))
    if evidence.course.stale:
        return evidence.course.stale
    if reason := unseen_save(evidence):
        return reason
    if not resume_args:
        reason = "the arguments with which this script resumes are not known: give --resume-args"
        return Uncovered(reason, "resume")
    if after is None:
        last = steps - 1
        return Uncovered(
            f"no save was seen before step {steps}: give --save-args that save after one of the"
            f" steps 1 to {last}",
            "checkpoint",
        )
    repeat = evidence.course.repeat
    # The repeat run writes the earlier save again; if its weights are others, its checkpoint is
    # that of another training.
    if repeat is not None and train is not None and not same_weights_after(repeat, train, after):
        return (
            f"the script also saves after step {train.steps()}, and is not reproducible: save less"
            " often"
        )
    if "saved" in evidence.missing:
        return (
            "the files of the train run in {checkpoint} cannot be copied:"
            f" {evidence.missing['saved']}"
        )
    return ""


def no_damage(evidence: Evidence) -> str:
    """Why its checkpoints cannot be damaged, or ""."""
    if evidence.train is None or evidence.resume is None:
        return evidence.missing.get("resume", "the script was not resumed")
    # A script that does not resume from an intact checkpoint shows nothing by failing on a damaged
    # one.
    if not evidence.resume.completed:
        return "the script does not resume from an intact checkpoint"
    path = outside(evidence.train, evidence.course.checkpoint, evidence.course.created)
    # Only files below {checkpoint} are copied for each run, so only they may be damaged.
    return f"the script saves to {path}, outside {{checkpoint}}" if path else ""


def never_written(path: str, steps: int, evidence: Evidence) -> str:
    """The message on a checkpoint that `--resume-args` names and the train run did not write."""
    tops = sorted({item.partition("/")[0] for item in evidence.course.left})
    there = ", ".join(f"{{checkpoint}}/{name}" for name in tops[:5]) or "nothing"
    return (
        f"--resume-args names {{checkpoint}}/{path}, which the train run of {steps} steps did not"
        f" write; it wrote {there}. Name one of these, save earlier (--save-args), or compare more"
        " steps (--steps)"
    )


def looks_above(error: str, evidence: Evidence) -> str:
    """The message on a resume that ended since a file is not in `{checkpoint}`, which the train run
    wrote to a folder there; or "".
    """
    missed = re.search(rf"'{re.escape(evidence.course.checkpoint)}/([^'/]+)'", error)
    name = missed.group(1) if missed else ""
    folders = [
        item.removesuffix(f"/{name}") for item in evidence.course.left if item.endswith(f"/{name}")
    ]
    # The script was given {checkpoint} and saves to a folder in it: the arguments are wrong, not
    # the script (resumes of public trainers that look one folder above).
    if not name or not folders:
        return ""
    found = ", ".join(f"{{checkpoint}}/{folder}" for folder in folders[:3])
    return (
        f"the resume looks for `{name}` in {{checkpoint}} itself, and the train run saved to"
        f" {found}: name that folder in --resume-args; if the script is to find it there by itself,"
        " it does not"
    )

"""What several rules on resumes look up."""

from __future__ import annotations

from ...analysis.presence import absent, unfinished
from ...evidence import LOADS, SAVES, Evidence
from ...trace import Run
from ...trace.events import Checkpoint, Place, Step

NEEDS = frozenset({"train", "resume"})


def first_steps(evidence: Evidence) -> tuple[list[Step], list[Step]] | str:
    """For each rank (the train run's step after the save, the resumed run's first step), or why there are none."""
    if evidence.resume is None:
        return evidence.missing.get("resume", "the script was not resumed")
    if not evidence.resume.completed and not evidence.resume.at_step(Step, 1):
        return "the resumed run did not reach an optimizer step (see run-completes)"
    after = evidence.saved_after()
    if after is None:
        return "the train run saved nothing before its last step, so there is nothing to compare a resume with"
    saved, resumed = evidence.trained.at_step(Step, after + 1), evidence.resume.at_step(Step, 1)
    if not saved or not resumed:
        return "the resumed run made no optimizer step"
    return saved, resumed


def not_resumed(evidence: Evidence, seen: object, reason: str) -> str:
    """Why a rule does not apply: train run and resume came to their end and show nothing of the kind; "" otherwise."""
    return absent(evidence.resume, seen, absent(evidence.trained, seen, reason))


def open_resume(evidence: Evidence) -> str:
    """Why train run and resume may have something that neither has shown."""
    if evidence.resume is None:
        return evidence.missing.get("resume", "the script was not resumed")
    return unfinished(evidence.trained) or unfinished(evidence.resume) or "neither run has come to it"


def keeps_no_state(run: Run) -> str:
    """Why a rule on optimizer state does not apply: no optimizer of a run has any after its first step; "" if one has."""
    seen = any(state for trace in run.traces for record in trace.of(Step) for state in record.state.values())
    later = any(record.step > 1 for trace in run.traces for record in trace.of(Step))
    return absent(run, seen or not later, "the optimizer keeps no state")


def load_line(evidence: Evidence, run: Run | None = None) -> Place | None:
    """The user's line that loads in a resumed run (by default the resume at the same world size), else the one that saves."""
    for operation in LOADS:
        if (line := evidence.line_of(run or evidence.resume, Checkpoint, op=operation)) is not None:
            return line
    return save_line(evidence)


def saved_at(evidence: Evidence) -> str:
    """` (saved at line 3 of train.py)`, for a finding that stands at the line that loads."""
    line = save_line(evidence)
    return f" (saved at line {line.line} of {line.file.rpartition('/')[2]})" if line is not None else ""


def save_line(evidence: Evidence) -> Place | None:
    """The user's line that saves."""
    lines = (evidence.line_of(evidence.train, Checkpoint, op=operation) for operation in SAVES)
    return next((line for line in lines if line is not None), None)

"""What rules on resumes share: the first step of a resumed run, and the lines that save and
load.
"""

from abc import abstractmethod

from ...analysis.applicability import absent, begins_elsewhere, unfinished
from ...evidence import LOADS, SAVES, Evidence
from ...trace.events import Checkpoint, Place, Step
from ..base import Finding, Rule, Run

NEEDS = frozenset({"train", "resume"})
RAISED = "Correct what ended the resumed run first: what it restores is judged after that."


class ResumeRule(Rule):
    """A rule that compares the first step of the resumed run with the train run's step after the
    save, rank by rank.
    """

    needs = NEEDS

    def judge(self, evidence: Evidence) -> Finding:
        steps = first_steps(evidence)
        return self.unknown(steps) if isinstance(steps, str) else self.compare(evidence, *steps)

    @abstractmethod
    def compare(self, evidence: Evidence, saved: list[Step], resumed: list[Step]) -> Finding:
        """The finding on these two steps of each rank."""


def first_steps(evidence: Evidence) -> tuple[list[Step], list[Step]] | str:
    """For each rank (the train run's step after the save, the resumed run's first step), or why
    there are none.
    """
    if evidence.resume is None:
        return evidence.missing.get("resume", "the script was not resumed")
    resumed = evidence.resume.at_step(Step, 1)
    # A resume that stopped before its first step is the fault of what stopped it (run-completes),
    # not of what it restores.
    if not evidence.resume.completed and not resumed:
        return "the resumed run stopped before its first optimizer step (see run-completes)"
    after = evidence.resumed_after()
    if after is None:
        return (
            "the train run saved nothing before its last step, so a resume has no step to be"
            " compared with"
        )
    # Where optimizers take turns and the save falls in mid-round, the resumed run begins with
    # another one's step: no weights or state can be compared (exam round 2 e_15_mutual_learning).
    if reason := begins_elsewhere(evidence.trained, evidence.resume, after):
        return reason
    saved = evidence.trained.at_step(Step, after + 1)
    return (saved, resumed) if saved and resumed else "the resumed run made no optimizer step"


def not_resumed(evidence: Evidence, seen: object, reason: str) -> str:
    """Why a rule does not apply: train run and resume came to their end and show nothing of the
    kind; "" otherwise.
    """
    return absent(evidence.resume, seen, absent(evidence.trained, seen, reason))


def not_shown(evidence: Evidence) -> str:
    """Why train run and resume may have something that neither has shown."""
    if evidence.resume is None:
        return evidence.missing.get("resume", "the script was not resumed")
    return (
        unfinished(evidence.trained)
        or unfinished(evidence.resume)
        or "train run and resume did not come to it"
    )


def keeps_no_state(run: Run, key: str = "") -> str:
    """Why a rule on optimizer state (of a `key`) does not apply: no step after the first has any;
    "" if one may.
    """
    steps = run.all(Step)
    seen = any(
        key in state if key else state for record in steps for state in record.state.values()
    )
    # An optimizer shows its state from the second step on: with one step alone it is not known that
    # it keeps none (zoo/sum_reduction.py (SGD without momentum)).
    later = any(record.step > 1 for record in steps)
    return absent(
        run, seen or not later, f"the optimizer keeps no {f'`{key}`' if key else 'state'}"
    )


def load_line(evidence: Evidence, run: Run | None = None) -> Place | None:
    """The user's line that loads in a resumed run (by default that at the same world size), else
    the one that saves.
    """
    resumed = run or evidence.resume
    lines = (
        [resumed.line_of(Checkpoint, op=operation) for operation in LOADS]
        if resumed is not None
        else []
    )
    return next(filter(None, lines), None) or save_line(evidence)


def saved_at(evidence: Evidence) -> str:
    """` (saved at line 3 of train.py)`, for a finding whose location is the line that loads."""
    line = save_line(evidence)
    return (
        f" (saved at line {line.line} of {line.file.rpartition('/')[2]})"
        if line is not None
        else ""
    )


def save_line(evidence: Evidence) -> Place | None:
    """The user's line that saves."""
    return next(
        filter(None, (evidence.trained.line_of(Checkpoint, op=operation) for operation in SAVES)),
        None,
    )

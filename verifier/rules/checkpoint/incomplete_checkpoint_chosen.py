import os

from ...analysis.root_cause import root_cause
from ...analysis.saves import Save, all_saves, final_path
from ...evidence import Evidence, named_checkpoint
from ...trace.events import Killed, Place, Removed, Renamed
from ..base import Finding, Flow, Hits, Rule, Run
from ._recovery import not_exact, outcome_of
from ._resumed import load_line


class IncompleteCheckpointChosen(Rule):
    """After a crash during a save the script resumes from the last complete checkpoint.

    Why: "the newest folder" may be one that a crash left half written: every restart stops with
    `.metadata` or `failed finding central directory` until somebody removes it. That is a warning:
    no wrong model is trained. It is a failure if the resume starts from the beginning, or if the
    complete checkpoint was deleted before the new one was there.
    Wrong:
        newest = max(Path(path).glob("step_*"), default=None)
    Right:
        complete = [p.parent for p in Path(path).glob("step_*/.metadata")]  # DCP writes it last
        newest = max(complete, default=None)
    Fix: Choose among folders that hold `.metadata`, or write to a temporary folder and rename it;
    then delete old ones.
    Source: awslabs/awsome-distributed-ai#190, PR#251; KempnerInstitute/KempnerForge#102;
    meta-pytorch/tnt PR#559.
    """

    needs = frozenset({"train", "resume", "crash"})

    def applies(self, evidence: Evidence) -> str:
        if reason := super().applies(evidence):
            return reason
        resumes = [resumed for _, resumed in evidence.crashes] or [
            run for run in (evidence.resume,) if run is not None
        ]
        named = [named_checkpoint(evidence.trained, run.command) for run in resumes]
        found = [one[0] for one in named if one is not None]
        return (
            # If --resume-args names one checkpoint the script chooses none: that the cut one is
            # read is the command's doing.
            f"the command names the checkpoint {found[0]}"
            if found and len(found) == len(named)
            else ""
        )

    def judge(self, evidence: Evidence) -> Finding:
        if not evidence.crashes:
            return self.unknown(evidence.missing.get("crash", "no save was interrupted"))
        notes = []
        for crash, resumed in evidence.crashes:
            torn = _torn(crash)
            if torn is None:
                return self.unknown(
                    f"{crash.note}: the records do not show which save was interrupted"
                )
            # Only a save before the interrupted one (and after a step) was complete and could have
            # been chosen.
            earlier = [save for save in all_saves(crash) if 0 < save.after < torn.after]
            # A script that overwrites its only checkpoint has nothing else to choose from: refusing
            # or starting anew is right then (scripts with one fixed path
            # (zoo/checkpoint_full_state.py)).
            apart = [save for save in earlier if final_path(crash, save) != final_path(crash, torn)]
            outcome = outcome_of(crash, resumed, evidence.resume)
            refused = outcome.steps == 0 and not resumed.completed
            # A start from scratch differs from a resume only where the intact checkpoint is
            # restored exactly.
            if apart and (refused or (outcome.fresh and not not_exact(evidence))):
                line = load_line(evidence)
                what = (
                    f"{crash.note}: the save after step {apart[-1].after} is complete, but the"
                    " resume"
                )
                if not refused:
                    return self.failed(f"{what} starts from the beginning", _removal(crash) or line)
                cause = root_cause(resumed)
                kept = _is_kept(apart[-1], crash, evidence) or _removal(crash) is not None
                lost = "" if kept else ", and that save was removed before this one was complete"
                return self.failed(
                    # A resume that stops at a cut checkpoint trains no wrong model, and the earlier
                    # one is still there: a warning. It fails where that one was removed first (exam
                    # round 1: 30 of 53 false alarms).
                    f"{what} stops{lost}: {cause.text}",
                    cause.location or line,
                    required=not kept,
                )
            lost = (
                "; the interrupted save overwrote the only checkpoint"
                if refused and earlier
                else ""
            )
            notes.append(f"{crash.note}: {'it resumes' if outcome.mixed else outcome}{lost}")
        return self.passed("; ".join(notes))

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops("dcp.async_save"):
            if event.discarded:
                yield (
                    (
                        "the future of async_save is discarded: nothing checks whether the save"
                        " completed"
                    ),
                    event,
                )


def _is_kept(save: Save, crash: Run, evidence: Evidence) -> bool:
    """Whether a save is still there after the crash; one that is not below the folder of
    `{checkpoint}` is not looked for.
    """
    path, folder = final_path(crash, save), evidence.course.checkpoint
    # A save outside {checkpoint} is not looked for after the crash: it is taken for kept.
    return not path.startswith(folder + os.sep) or os.path.relpath(path, folder) in crash.left


def _removal(crash: Run) -> Place | None:
    """The line that removes an earlier save, if a rank was killed before it gave its place to the
    next one, which is complete.
    """
    killed = next((trace for trace in crash.traces if trace.first(Killed) is not None), None)
    # Between the removal of the old checkpoint and the rename of the new one, complete under its
    # temporary name, a crash leaves none: the removal's line is at fault (dion (public trainer;
    # fault incomplete_checkpoint_chosen_5.yaml)).
    if killed is None or killed.of(Killed)[0].moment != "before-rename":
        return None
    return next(
        (
            record.at_line
            for record in reversed(killed.records)
            if isinstance(record, Removed | Renamed)
        ),
        None,
    )


def _torn(crash: Run) -> Save | None:
    """The save in which a rank was killed."""
    killed = next((trace for trace in crash.traces if trace.first(Killed) is not None), None)
    saves = [save for save in all_saves(crash) if killed is not None and save.rank == killed.rank]
    return saves[-1] if saves else None

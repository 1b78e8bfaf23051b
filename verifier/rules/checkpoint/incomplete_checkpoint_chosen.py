from collections.abc import Iterator

from ...analysis.root_cause import root_cause
from ...analysis.saves import Save, all_saves
from ...evidence import Evidence, named_checkpoint
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.registry import detector
from ...trace import Run
from ...trace.events import Killed
from ..base import Rule
from ._recovery import NEEDS, not_exact, outcome_of
from ._resumed import load_line


class IncompleteCheckpointChosen(Rule):
    """After a crash in the middle of a save the script goes on from the last complete checkpoint.

    Why: "the newest folder" may be one that a crash has left half written: the resume stops with `.metadata` or
    `failed finding central directory`, on every restart. The same happens when `latest` is moved, or older
    checkpoints are deleted, before the new one is complete.
    Wrong:
        newest = max(Path(path).glob("step_*"), default=None)
    Right:
        complete = [p.parent for p in Path(path).glob("step_*/.metadata")]  # DCP writes it last
        newest = max(complete, default=None)
    Fix: Choose among folders that hold `.metadata`, or write under a temporary name and rename; delete old ones after that.
    Source: awslabs/awsome-distributed-ai#190, PR#251; KempnerInstitute/KempnerForge#102; meta-pytorch/tnt PR#559.
    """

    needs = NEEDS

    def applies(self, evidence: Evidence) -> str:
        if reason := super().applies(evidence):
            return reason
        resumes = [recovered for _, recovered in evidence.crashes] or [
            run for run in (evidence.resume,) if run is not None
        ]
        named = [named_checkpoint(evidence.trained, run.command) for run in resumes]
        found = [one[0] for one in named if one is not None]
        return f"the command names {found[0]}: there is nothing to choose" if found and len(found) == len(named) else ""

    def judge(self, evidence: Evidence) -> Finding:
        if not evidence.crashes:
            return self.unknown(evidence.missing.get("crash", "no save was interrupted"))
        told = []
        for crash, recovered in evidence.crashes:
            torn = _torn(crash)
            earlier = [save for save in all_saves(crash) if torn is not None and 0 < save.after < torn.after]
            if torn is None:
                return self.unknown("it is not known which save was interrupted")
            apart = [save for save in earlier if save.to != torn.to]
            outcome = outcome_of(crash, recovered)
            if outcome.steps == 0 and recovered.completed:
                told.append(f"{crash.note}: the resume ended before a step")
            elif outcome.steps == 0 and apart:
                cause = root_cause(recovered)
                return self.failed(
                    f"{crash.note}; the save after step {apart[-1].after} was complete, but the resume does not start: {cause.text}",
                    cause.location or load_line(evidence),
                )
            elif outcome.fresh and apart and not_exact(evidence) is None:
                return self.failed(
                    f"{crash.note}; the save after step {apart[-1].after} was complete, but the resume starts from the beginning",
                    load_line(evidence),
                )
            elif outcome.steps == 0:
                lost = ", and the checkpoint that it overwrote is gone with it" if earlier else ""
                told.append(f"{crash.note}: the resume refuses what is left{lost}")
            elif outcome.fresh:
                told.append(f"{crash.note}: the resume starts from the beginning")
            elif outcome.step is not None:
                told.append(f"{crash.note}: it resumes from the save after step {outcome.step}, bitwise")
            else:
                told.append(f"{crash.note}: it resumes")
        return self.passed("; ".join(told))


def _torn(crash: Run) -> Save | None:
    """The save in which a rank was killed."""
    killed = next((trace for trace in crash.traces if trace.first(Killed) is not None), None)
    saves = [save for save in all_saves(crash) if killed is not None and save.rank == killed.rank]
    return saves[-1] if saves else None


@detector("incomplete-checkpoint-chosen")
def result_discarded(flow: Flow) -> Iterator[Hit]:
    for event in flow.ops("dcp.async_save"):
        if event.discarded:
            told = "the result of async_save is thrown away: nobody knows whether the checkpoint was finished"
            yield flow.hit("incomplete-checkpoint-chosen", told, event)

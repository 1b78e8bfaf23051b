"""What several rules on gradients start from."""

from ...trace.events import Step, Sync, Zeroed
from ..base import Evidence, Rule


class UnreducedRule(Rule):
    """A rule on gradients that FSDP keeps unreduced."""

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        calls = [*run.all(Sync), *run.all(Zeroed)]
        kept = calls or any(record.unsynced for record in run.all(Step))
        return (
            ""
            if kept
            else "the script never calls `set_requires_gradient_sync`: every backward reduces"
        )


class ScaleRule(Rule):
    """A rule on the scale of the loss, which needs a step of the full-precision run."""

    def too_short(self, evidence: Evidence) -> str:
        reason, run = super().too_short(evidence), evidence.full_precision
        if reason or (run is not None and run.steps()):
            return reason
        return evidence.missing.get("full_precision", "the full-precision run made no step")

"""Rules on errors that checkpoint functions raise."""

from __future__ import annotations

from ...evidence import Evidence
from ..base import RaisedRule


class CheckpointError(RaisedRule):
    """An error may stop the run before it has saved anything: then its text decides, not what the run has shown."""

    def applies(self, evidence: Evidence) -> str:
        return "" if _stopped(evidence) else super().applies(evidence)

    def unseen(self, evidence: Evidence) -> str:
        return "" if _stopped(evidence) else super().unseen(evidence)


def _stopped(evidence: Evidence) -> bool:
    return evidence.train is None or not evidence.train.completed

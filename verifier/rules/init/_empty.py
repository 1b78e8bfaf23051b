"""Memory that `to_empty` allocates."""

from __future__ import annotations

from ...analysis.wording import some
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ...trace.events import ToEmpty
from ..base import Rule


class EmptyRule(Rule):
    """A rule on what `to_empty` allocates: a run of its own (provoked) fills it with NaN."""

    needs = frozenset({"train", "provoked"})
    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        called = any(trace.first(ToEmpty) is not None for trace in evidence.trained.traces)
        return "" if called else "the script does not call to_empty before its first forward"

    def judge(self, evidence: Evidence) -> Finding:
        run, filled = evidence.trained, evidence.provoked
        if filled is None or not filled.models:
            return self.unknown("the run that fills the memory of to_empty with NaN did not reach a forward")
        if unset := self.unset(filled):
            what = f"{some(unset)}: allocated by to_empty and not initialised before the first forward"
            return self.failed(what, evidence.line_of(run, ToEmpty))
        return self.passed(f"{self.allocated(run)} initialised after to_empty")

    def unset(self, filled: Run) -> list[str]:
        """What still holds NaN at the first forward."""
        raise NotImplementedError

    def allocated(self, run: Run) -> str:
        """What was looked at: `3 buffers`."""
        raise NotImplementedError

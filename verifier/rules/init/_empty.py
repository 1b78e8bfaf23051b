"""Memory that `to_empty` allocates."""

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from ...trace.events import ToEmpty, Unset
from ..base import Evidence, Finding, Rule, Run, count, some


class EmptyRule(Rule):
    """A rule on what `to_empty` allocates: a run of its own (provoked) fills it with NaN."""

    needs = frozenset({"train", "provoked"})
    wants = "models"
    # Failures that follow from memory that nothing filled (faults meta_buffers_garbage*.py,
    # meta_params_not_reset.py): what lies there differs between ranks and runs, and a NaN spreads.
    explains: ClassVar[tuple[str, ...]] = (
        "load-without-set",
        "optim-template-empty",
        "state-restored",
        "state-same-on-ranks",
    )
    kind: ClassVar[str]

    def applies(self, evidence: Evidence) -> str:
        if not evidence.trained.all(ToEmpty):
            return "the script does not call to_empty before its first forward"
        return "" if self.parts(evidence.trained) else f"the model has no {self.kind}"

    def judge(self, evidence: Evidence) -> Finding:
        run, filled = evidence.trained, evidence.provoked
        # Whether memory of to_empty is filled shows only in a run that puts NaN there: numbers that
        # happen to lie there look like weights.
        if filled is None or not filled.models:
            lacks = "the run that fills the memory of to_empty with NaN did not reach a forward"
            return self.unknown(evidence.missing.get("provoked", lacks))
        if unset := [name for name, is_unset in self.parts(filled) if is_unset]:
            called = run.line_of(ToEmpty)
            line = f" (line {called.line} of {Path(called.file).name})" if called else ""
            what = (
                f"{some(unset)}: allocated by to_empty{line} and not initialised before the first"
                " forward"
            )
            made = next(
                (r.at_line for r in filled.places(Unset) if r.name == unset[0].partition(" ")[0]),
                None,
            )
            return self.failed(what, made or called)
        return self.passed(f"{count(len(self.parts(run)), self.kind)} initialised after to_empty")

    @abstractmethod
    def parts(self, run: Run) -> list[tuple[str, bool]]:
        """(name, whether it is still NaN at the first forward) of what `to_empty` allocates."""

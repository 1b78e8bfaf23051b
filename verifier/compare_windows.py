"""Compares steps behind the first ones: windows, each with runs of its own.

A run of a window makes all steps before it, of which nothing is recorded, and loads weights, states
of optimizers and buffers that the script has reached there.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from . import stages
from .analysis.root_cause import root_cause
from .config.windows import Window
from .evidence import Evidence, InWindow
from .execute import Executor
from .finding import Finding
from .judge import judge
from .judging.in_windows import not_compared
from .launch.planned import PlannedRun
from .rules import RULES
from .source.scan import with_texts
from .stages.followup_stages import SETTLED
from .stages.late import not_to_be_skipped, nudged, others, script, windows_wanted
from .trace import Run


def with_windows(settings: stages.Settings, executor: Executor, evidence: Evidence) -> Evidence:
    """The evidence with its windows; those that are not compared say why.

    Where the first steps already differ, later ones would show nothing else.
    """
    rules = [name for name in settings.chosen if RULES[name].in_windows]
    wanted = windows_wanted(settings, evidence)
    if not wanted or not rules:
        return evidence
    first = judge(with_texts(evidence), settings.chosen)
    if _fail(first):
        return evidence
    agreed = [finding.rule for finding in first if finding.status == "pass"]
    trouble = not_to_be_skipped(settings)
    made: list[InWindow] = []
    for window, left_out in wanted:
        why = trouble or left_out
        shown = (one.evidence for one in made if one.evidence is not None)
        if not why and any(_fail(judge(one, rules)) for one in shown):
            why = "a window before it shows a fault"
        if why:
            made.append(InWindow(window, None, why))
        else:
            made.append(_Making(settings, executor, evidence, window, rules).made(agreed))
    return replace(evidence, windows=tuple(made))


def _fail(findings: Iterable[Finding]) -> bool:
    return any(f.status in ("fail", "error") and f.required for f in findings)


class _Making:
    """Makes the runs of one window."""

    def __init__(
        self,
        settings: stages.Settings,
        executor: Executor,
        first: Evidence,
        window: Window,
        rules: Sequence[str],
    ) -> None:
        self.settings = replace(settings, window=window, chosen=rules)
        self.executor, self.first, self.window = executor, first, window

    def made(self, agreed: Collection[str]) -> InWindow:
        """The window with its runs, as far as they could be made.

        `agreed`: the rules that passed in the first steps.
        """
        train, why = self._run(script(self.settings, self.first))
        if train is None:
            return InWindow(self.window, None, why)
        evidence = Evidence(
            train=train,
            full_precision=train,
            sources=self.first.sources,
            course=self.first.course,
            tolerances=self.first.tolerances,
            suppressions=self.first.suppressions,
            average=self.first.average,
            cuda_on_cpu=self.first.cuda_on_cpu,
            options=self.first.options,
        )
        planned = others(self.settings, self.first)
        for one in self.executor.make(planned):
            if one.run is not None:
                evidence = evidence.having(one.planned.role, one.run)
        evidence = with_texts(stages.completed(self.settings, evidence))
        found = judge(evidence, self.settings.chosen)
        if planned and any(one.status not in SETTLED for one in found):
            noise, _ = self._run(nudged(planned[0]))
            if noise is not None:
                evidence = evidence.having("perturbed", noise)
                found = judge(evidence, self.settings.chosen)
        why = not_compared(self.window, found, agreed)
        return InWindow(self.window, None if why else evidence, why)

    def _run(self, planned: PlannedRun) -> tuple[Run | None, str]:
        """A run that made all steps of the window; None, with the reason, if it has not."""
        (made,) = self.executor.make([planned])
        run, steps = made.run, self.settings.steps
        if run is None:
            return None, made.trouble
        if not run.completed:
            return None, f"the run did not complete: {root_cause(run).text}"
        if run.steps() < steps:
            return None, f"the run came to its end after {run.steps()} of its {steps} steps"
        return run, ""

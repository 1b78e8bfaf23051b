"""The verdict on all findings, and its comparison with an earlier report."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, get_args

from .errors import FAIL, INCONCLUSIVE, OUR_FAULT, PASS, Interrupted
from .finding import Answer, Finding, Remark, Status, Tier


@dataclass(frozen=True)
class Comparison:
    """A verdict compared with an earlier report (see baseline.py): failures that are new, known, or
    fixed.

    `new` and `standing` are findings of this verdict; `gone` and `unjudged` (not judged this time)
    are failures of the earlier one. `still_open` are rules that were inconclusive then and are now.
    """

    path: str
    new: tuple[Finding, ...]
    standing: tuple[Finding, ...]
    gone: tuple[Finding, ...]
    unjudged: tuple[Finding, ...]
    still_open: frozenset[str] = frozenset()

    def stands(self, finding: Finding) -> bool:
        """Whether this failure is in the earlier report."""
        return any(finding is known for known in self.standing)


@dataclass(frozen=True)
class Verdict:
    """The answer for one target.

    With a `baseline`, `verdict` is about the target, and `answer` about what is new.
    """

    verdict: Answer
    target: dict[str, Any]
    environment: dict[str, Any]
    runs: Sequence[dict[str, Any]]
    findings: Sequence[Finding]
    facts: dict[str, Any] = field(default_factory=dict)
    folder: str = ""
    seconds: float = 0.0
    skipped: Sequence[
        dict[str, Any]
    ] = ()  # rules that were not judged: {"rule", "reason", "until"}
    baseline: Comparison | None = None
    interrupted: str = ""  # by which signal: what was not judged until then is inconclusive
    refused: str = ""  # why ranks could not run here: what needs them is inconclusive
    # a command that judges more, from the script's own options; it is never run unasked
    suggestion: str = ""
    remarks: Sequence[Remark] = ()  # on the policy: what the base branch's has refused

    @property
    def tier(self) -> Tier:
        """By what this was judged: the sources alone, one simulated process, or ranks."""
        if "sources" in self.facts:
            return "static"
        return (
            "simulate"
            if self.runs and all(run["role"] == "simulate" for run in self.runs)
            else "ranks"
        )

    @property
    def linted(self) -> bool:
        """Whether this is the answer of `fsdp2 lint`."""
        return "files" in self.target

    @property
    def partial(self) -> str:
        """Why this is not what was asked for, in one line; "" if it is."""
        number = f"{len(self.runs)} run{'' if len(self.runs) == 1 else 's'}"
        if self.interrupted:
            return (
                f"INTERRUPTED by {self.interrupted} after {number}: incomplete, not a verdict on"
                " the script"
            )
        if self.tier == "static" and self.verdict == "inconclusive":
            files = self.facts["sources"]["files"]
            where = self.target["script"] if files == 1 else f"{files} files"
            return f"no training found in {where}: nothing was checked"
        if self.verdict == "no_findings" and not self.linted:
            return "only the sources were read: --tier ranks runs the script and verifies it"
        if not self.refused:
            return ""
        if any(run["role"] != "simulate" for run in self.runs):
            return f"CUT SHORT after {number}: incomplete: environment error: {self.refused}"
        tiers = "the static and the simulated tier" if self.runs else "the static tier"
        return f"NO RANKS WERE JUDGED, only {tiers}: environment error: {self.refused}"

    @property
    def counts(self) -> dict[str, int]:
        """How many findings there are of each status that occurs; those that warn are of "warning"
        alone.
        """
        statuses = ["warning" if finding.warns else finding.status for finding in self.findings]
        known = (*get_args(Status), "warning")
        return {status: statuses.count(status) for status in known if status in statuses}

    @property
    def answer(self) -> Answer:
        """The answer for a CI gate: the verdict, or, with a baseline, that of all findings but the
        standing failures.
        """
        if self.baseline is None:
            return self.verdict
        return self.of([f for f in self.findings if not self.baseline.stands(f)])

    def of(self, findings: Sequence[Finding]) -> Answer:
        """`verdict_of`, unless runs are missing: a partial result never passes, and an interrupted
        one does not fail either.

        Sources alone never pass: without findings they give `no_findings`, and without any training
        nothing at all.
        """
        status = verdict_of(findings)
        if not findings and self.skipped and self.baseline is None:
            return "inconclusive"  # every rule was left out: nothing was checked
        if status == "pass" and self.tier == "static":
            sources = self.facts["sources"]
            trained = (
                sources["without_training"] < sources["files"] or not sources["training_required"]
            )
            return "no_findings" if trained else "inconclusive"
        return "inconclusive" if self.interrupted or (self.refused and status == "pass") else status

    def decided(self) -> Self:
        """This verdict, recomputed from its findings."""
        return replace(self, verdict=self.of(self.findings))

    @property
    def exit_code(self) -> int:
        """The exit code of the command that has this answer."""
        if self.interrupted:
            return 128 + signal.Signals[self.interrupted]
        # as for other linters; `verify` has to prove something
        clean = PASS if self.linted else INCONCLUSIVE
        codes = {
            "pass": PASS,
            "fail": FAIL,
            "inconclusive": INCONCLUSIVE,
            "error": OUR_FAULT,
            "no_findings": clean,
        }
        return codes[self.answer]

    @property
    def failures(self) -> list[Finding]:
        """Failures and errors, then warnings; of each those that the baseline has come last, and
        consequences behind what they follow from.
        """
        found = [f for f in self.findings if f.status in ("fail", "error")]
        return sorted(found, key=lambda f: (f.consequence, f.warns, self.stands(f)))

    def remarked(self, remarks: Sequence[Remark]) -> Self:
        """This verdict with remarks on the policy, which are notes, too."""
        notes = [*self.environment.get("notes", ()), *(remark.text for remark in remarks)]
        environment = {**self.environment, "notes": notes} if remarks else self.environment
        return replace(self, environment=environment, remarks=(*self.remarks, *remarks))

    def stands(self, finding: Finding) -> bool:
        """Whether this failure is known from the baseline, if there is one."""
        return self.baseline is not None and self.baseline.stands(finding)


class CutShort(Interrupted):
    """Interrupted, with the `verdict` on what was found until then."""

    def __init__(self, code: int, verdict: Verdict) -> None:
        super().__init__(code)
        self.verdict = verdict


def verdict_of(findings: Sequence[Finding]) -> Answer:
    """fail if anything failed, else error, else inconclusive if anything required could not be
    checked, else pass.

    What does not apply, and what no run did, is no obstacle to a pass; but where nothing else is
    left, nothing was checked.
    """
    statuses = {f.status for f in findings if f.required}
    if statuses and statuses <= {"not_applicable", "not_covered"}:
        return "inconclusive"
    order: tuple[Answer, ...] = ("fail", "error", "inconclusive")
    return next((status for status in order if status in statuses), "pass")

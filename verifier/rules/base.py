"""What a rule is: a name, a page, and a pure function from evidence to a finding."""

from __future__ import annotations

import inspect
import re
import textwrap
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from ..analysis.checkpoints import no_checkpoint, unseen_save
from ..analysis.presence import unnamed
from ..analysis.root_cause import RootCause, root_cause
from ..evidence import Evidence
from ..finding import Finding
from ..trace import Run
from ..trace.events import Place

RESUMED = frozenset({"resume", "reshard", "crash", "damaged"})
SECTIONS = ("Why", "Wrong", "Right", "Fix", "Source", "Torch")
DEVELOPED_ON = "run on 2.13.0."  # the section Torch of a page that has none of its own


class Rule(ABC):
    """One clause of the contract. The docstring of a subclass is its page: statement, then `Section:` blocks."""

    name: ClassVar[str]  # from the name of its module
    family: ClassVar[str]  # from the folder
    explains: ClassVar[tuple[str, ...]] = ()  # rules of its family whose failure may follow from this one's
    needs: ClassVar[frozenset[str]] = frozenset({"train"})  # the roles whose runs it looks at
    reads: ClassVar[frozenset[str]] = frozenset()  # further ones, if other rules need them
    wants: ClassVar[Literal["nothing", "run", "models", "steps"]] = (
        "steps"  # what the train run must have come to first
    )
    named_by: ClassVar[tuple[str, ...]] = ()  # it does not apply where the sources name none of these
    simulated: ClassVar[bool] = False  # whether a run with a fake process group shows enough
    skipped_with: ClassVar[tuple[str, ...]] = ()  # further families whose `--skip` leaves it out
    names_a_cause: ClassVar[bool] = True  # False: it sees that something is wrong, not what

    @property
    def about_checkpoints(self) -> bool:
        """Whether it says something about checkpoints, or about a run that resumes from one."""
        return self.family == "checkpoint" or bool(self.needs & RESUMED)

    def too_short(self, evidence: Evidence) -> str:
        """Why the train run has not come to what this rule wants, "" if it has: then `evidence.trained` is that run."""
        run = evidence.train
        if self.wants == "nothing":
            return ""
        if run is None or not run.traces:
            return evidence.missing.get("train", "the script was not run")
        if self.wants == "models" and not run.models:
            return "no forward of a model was seen"
        return "no optimizer step was seen" if self.wants == "steps" and run.steps() == 0 else ""

    def applies(self, evidence: Evidence) -> str:
        """ "" if the script has what this rule is about, else the reason why it has nothing of the kind."""
        return no_checkpoint(evidence) if self.about_checkpoints else ""

    def unseen(self, evidence: Evidence) -> str:
        """Why the script has it and no run has shown it, with the option or edit that would; "" if one has."""
        return unseen_save(evidence) if self.about_checkpoints else ""

    @abstractmethod
    def judge(self, evidence: Evidence) -> Finding:
        """The finding of this rule on the evidence; a pure function."""

    def __init_subclass__(cls) -> None:
        package, family, module = ("", *cls.__module__.split("."))[-3:]
        if package == "rules" and not module.startswith("_"):
            cls.name, cls.family = module.replace("_", "-"), family

    @classmethod
    def page(cls) -> dict[str, str]:
        """The docstring, cut into "Statement" and the sections of SECTIONS."""
        sections = {"Statement": ""}
        current = "Statement"
        for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
            head, colon, rest = line.partition(":")
            if colon and head in SECTIONS:
                current, line = head, rest.strip()
            sections[current] = f"{sections.get(current, '')}\n{line}".strip("\n")
        sections.setdefault("Torch", DEVELOPED_ON)
        return {key: textwrap.dedent(text).strip("\n") for key, text in sections.items()}

    def passed(self, evidence: str, **more: Any) -> Finding:
        """The clause holds."""
        return Finding(self.name, "pass", evidence, **more)

    def failed(self, evidence: str, location: Place | None = None, **more: Any) -> Finding:
        """The clause is broken; `fix` defaults to the page's fix."""
        more.setdefault("fix", " ".join(self.page()["Fix"].split()))
        return Finding(self.name, "fail", evidence, location=location, **more)

    def not_applicable(self, reason: str, **more: Any) -> Finding:
        """The script has nothing that the clause is about."""
        return Finding(self.name, "not_applicable", reason, **more)

    def unknown(self, reason: str, **more: Any) -> Finding:
        """The clause could not be checked."""
        return Finding(self.name, "inconclusive", reason, **more)


class SourceRule(Rule):
    """A clause that only the sources can break: its static detector decides."""

    needs = frozenset()
    wants = "nothing"
    simulated = True

    def applies(self, evidence: Evidence) -> str:
        return unnamed(evidence.sources, *self.named_by)

    def not_applicable(self, reason: str, **more: Any) -> Finding:
        return super().not_applicable(reason, tier="static", **more)

    def judge(self, evidence: Evidence) -> Finding:
        hits = evidence.hits.get(self.name, ())
        if hits:
            return self.failed(hits[0].told, hits[0].location, tier="static")
        if not evidence.followed:
            return self.unknown("no training was found by following the sources", tier="static")
        return self.passed("looked for in the sources, from the script on: there is none", tier="static")


class RaisedRule(Rule):
    """A clause that torch itself enforces, with an error that does not say what to do.

    `pattern` is searched in `ErrorName: message` of the error that made a run fail. Where several rules know one text,
    `fits` decides, by what the run recorded.
    """

    wants = "nothing"
    simulated = True
    reads = frozenset({"resume"})
    pattern: ClassVar[str]

    def applies(self, evidence: Evidence) -> str:
        if reason := super().applies(evidence):
            return reason
        train = evidence.train
        runs = (train, evidence.resume, *evidence.reshards)
        if train is None or train.steps() == 0 or any(run is not None and not run.completed for run in runs):
            return ""  # what was not met may lie behind where a run stopped
        return self.absent(train) or unnamed(evidence.sources, *self.named_by)

    def absent(self, train: Run) -> str:
        """Why a train run that completed has nothing of the kind; "" if it has."""
        return ""

    def judge(self, evidence: Evidence) -> Finding:
        for run in (evidence.train, evidence.resume, *evidence.reshards):
            if run is None or run.completed:
                continue
            cause = root_cause(run)
            found = re.search(self.pattern, cause.error)
            if found is not None and self.fits(run, cause):
                return self.failed(
                    f"the {run.role} run stopped: {self.told(found, cause.text)}", self.place(run, cause)
                )
        if evidence.train is None or evidence.train.steps() == 0:
            return self.unknown("the train run made no step, for another reason")
        return self.passed("no run was stopped by it")

    def fits(self, run: Run, cause: RootCause) -> bool:
        """Whether the error is this rule's, beyond its text."""
        return True

    def place(self, run: Run, cause: RootCause) -> Place | None:
        """The user's line that is to be changed."""
        return cause.location

    def told(self, found: re.Match[str], text: str) -> str:
        """What is said of a match; `text` is what `root_cause` says of the run."""
        return text

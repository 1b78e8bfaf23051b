"""What a rule is: a name, an explanation, and a pure function from evidence to a finding."""

import inspect
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal, TypeVar

from ..analysis.applicability import never_sharded, trainings, unnamed, went_through, without_steps
from ..analysis.checkpoints import no_checkpoint, only_exports, own_files, unseen_save
from ..analysis.root_cause import RootCause, root_cause
from ..analysis.static_hits import reached_hit
from ..analysis.wording import count, some
from ..evidence import Evidence
from ..finding import Finding, Hit, Status, Uncovered
from ..source.events import Event, Flow
from ..source.registry import DETECTORS
from ..trace import Run
from ..trace.events import Place, Shard
from ..trace.roles import OF_CHECKPOINTS
from .policies import AfterSharding, JudgesExports, NeedsSharding, OnlyWarns, Policy

SECTIONS = (
    "Seen",
    "Why",
    "Wrong",
    "Right",
    "Fix",
    "Source",
    "Torch",
)  # Seen: an error or a symptom, for the contract
DEVELOPED_ON = "run on 2.13.0."  # the section Torch of an explanation that has none of its own
Kind = TypeVar("Kind", bound=Policy)
Hits = Iterator[
    tuple[str, Event | Place]
]  # what a static detector yields: what is wrong, and the call or line that is

# The words in which rules are written.
__all__ = [
    "Event",
    "Evidence",
    "Finding",
    "Flow",
    "Hits",
    "RaisedRule",
    "RootCause",
    "Rule",
    "Run",
    "SourceRule",
    "Uncovered",
    "count",
    "some",
]


class Rule(ABC):
    """One clause of the contract: what it needs and reads, whom it explains, how it is judged.

    The docstring of a subclass explains it: statement, then `Section:` blocks.
    """

    name: ClassVar[str]  # from the name of its module
    family: ClassVar[str]  # from the folder
    explains: ClassVar[tuple[str, ...]] = ()  # rules whose failure may follow from this one's
    needs: ClassVar[frozenset[str]] = frozenset({"train"})  # the roles whose runs it reads
    # roles that it reads too, if other rules need them
    reads: ClassVar[frozenset[str]] = frozenset()
    # what the train run must have recorded
    wants: ClassVar[Literal["nothing", "run", "models", "steps"]] = "steps"
    # it does not apply where the sources name none of these
    named_by: ClassVar[tuple[str, ...]] = ()
    in_windows: ClassVar[bool] = False  # whether it is judged behind the first steps, too
    one_rank: ClassVar[str] = ""  # why it does not apply with one rank; "" if it does
    simulated: ClassVar[bool] = False  # whether a run with a fake process group shows enough
    names_a_cause: ClassVar[bool] = True  # False: it detects that something is wrong, not what
    policies: ClassVar[tuple[Policy, ...]] = ()  # how it is judged unlike the others: policies.py

    def policy(self, kind: type[Kind]) -> Kind | None:
        """Its policy of a kind; None if it has none."""
        return next((one for one in self.policies if isinstance(one, kind)), None)

    @property
    def about_checkpoints(self) -> bool:
        """Whether it judges checkpoints, or a run that resumes from one."""
        return self.family == "checkpoint" or bool(self.needs & OF_CHECKPOINTS)

    @property
    def about_the_resume(self) -> bool:
        """Whether it judges a run that resumes on as many ranks from an intact checkpoint."""
        return "resume" in self.needs and not self.needs & {"reshard", "crash", "damaged"}

    def too_short(self, evidence: Evidence) -> str:
        """Why the train run has not recorded what this rule wants; "" if it has, and
        `evidence.trained` is that run.
        """
        run = evidence.train
        if self.wants == "nothing":
            return ""
        if run is None or not run.traces:
            return evidence.missing.get("train", "the script was not run")
        if self.wants == "models" and not run.models:
            return "the train run recorded no forward of a model"
        return without_steps(run) if self.wants == "steps" else ""

    def applies(self, evidence: Evidence) -> str:
        """Why the script has nothing that this rule is about; "" if it has, or if that is not
        known.
        """
        if self.one_rank and evidence.train is not None and evidence.train.world_size == 1:
            return f"not applicable with one rank: {self.one_rank}"
        if not self.about_checkpoints:
            return ""
        # JSON, NumPy, raw files: the verifier knows no write of the script's own format that it
        # could interrupt or damage. Checkpoints in a format of the script's own are neither
        # interrupted nor damaged: the verifier does not know their writes (scripts with checkpoints
        # in JSON, NumPy or raw files).
        if self.needs & {"crash", "damaged"} and (reason := own_files(evidence)):
            return reason
        # What nothing resumes from is an export (zoo/lora_adapters.py): only its content is judged.
        # What nothing resumes from is an export: rules on a resume do not apply, rules on the
        # file's content do (zoo/lora_adapters.py).
        return no_checkpoint(evidence) or (
            "" if self.policy(JudgesExports) else only_exports(evidence)
        )

    def unseen(self, evidence: Evidence) -> str:
        """Why no run has shown what the script has (Uncovered, where the script has it and no run
        did it), with the option or edit that makes one; "" if one has.
        """
        return unseen_save(evidence) if self.about_checkpoints else ""

    @abstractmethod
    def judge(self, evidence: Evidence) -> Finding:
        """The finding of this rule on the evidence; a pure function."""

    def detect(self, flow: Flow) -> Hits:
        """The breaches that one followed script shows without a run; a rule that overrides it has a
        static detector.
        """
        return iter(())

    def __init_subclass__(cls) -> None:
        package, family, module = ("", *cls.__module__.split("."))[-3:]
        if package == "rules" and not module.startswith("_"):
            cls.name, cls.family = module.replace("_", "-"), family
            if "detect" in vars(cls):
                DETECTORS[cls.name] = cls._hits

    @classmethod
    def _hits(cls, flow: Flow) -> Iterator[Hit]:
        for message, at in cls().detect(flow):
            yield (
                Hit(cls.name, message, at)
                if isinstance(at, Place)
                else flow.hit(cls.name, message, at)
            )

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
        """The clause is broken; `fix` defaults to the section Fix."""
        more.setdefault("required", self.policy(OnlyWarns) is None)
        more.setdefault("fix", " ".join(self.page()["Fix"].split()))
        return Finding(self.name, "fail", evidence, location=location, **more)

    def not_applicable(self, reason: str, **more: Any) -> Finding:
        """The script has nothing that the clause is about; or no run did it, if the reason is
        Uncovered.
        """
        return self._without("not_applicable", reason, **more)

    def unknown(self, reason: str, **more: Any) -> Finding:
        """The clause could not be checked; or no run did what it is about, if the reason is
        Uncovered.
        """
        return self._without("inconclusive", reason, **more)

    def _without(self, status: Status, reason: str, **more: Any) -> Finding:
        if isinstance(reason, Uncovered):
            return Finding(self.name, "not_covered", str(reason), part=reason.part, **more)
        return Finding(self.name, status, reason, **more)


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
        if hits := evidence.hits.get(self.name, ()):
            return seen(self, evidence, hits)
        # Where following the script came to no training, the sources prove nothing.
        if not evidence.followed:
            what = "following the calls from the script on, no training was found"
            reason = f"{what}; `fsdp2 lint` on the project's folder reads every function"
            return self.unknown(
                Uncovered(reason, "the sources, which could not be followed"), tier="static"
            )
        return self.passed(f"no breach in the sources, followed {evidence.followed}", tier="static")


def lines_to_reach(evidence: Evidence, rules: Iterable[Rule]) -> dict[str, list[int]]:
    """{file: lines} outside the script where the sources show a fault: harmless in a package's code
    that nothing calls.
    """
    found: dict[str, list[int]] = {}
    script = evidence.sources.project[:1]
    for rule in rules:
        for place in (hit.location for hit in evidence.hits.get(rule.name, ())):
            if (place.file,) != script:
                found.setdefault(place.file, []).append(place.line)
    return found


def seen(rule: Rule, evidence: Evidence, hits: tuple[Hit, ...]) -> Finding:
    """The failure that the sources show. Code that no rank of a run reached trained nothing wrong:
    the finding warns, and names the line (public trainers' packages; an optimizer that was not
    chosen, in tang0389/himuon).
    """
    hit = reached_hit(evidence, hits)
    if hit is not None:
        return rule.failed(hit.message, hit.location, tier="static")
    message = f"{hits[0].message}; no rank of the runs reached this line"
    return rule.failed(message, hits[0].location, tier="static", required=False)


class RaisedRule(Rule):
    """A clause that torch itself enforces, with an error that does not say what to do.

    `pattern` is searched in `ErrorName: message` of the error that made a run fail. Where several
    rules have the same text, `fits` decides by what the run recorded. If the error stops the run
    before it has shown whether the rule applies, the text of the error decides.
    """

    explains = ("run-completes",)
    wants = "nothing"
    simulated = True
    reads = frozenset({"resume"})
    pattern: ClassVar[str]

    def applies(self, evidence: Evidence) -> str:
        # An error that was raised decides, even where sources and train run seem to have nothing of
        # the kind (exam round 1).
        # An error that was raised decides, even where the sources or the train run seem to have
        # nothing of the kind (exam round 1).
        if not went_through(evidence) or self._raised(evidence) is not None:
            return ""
        return (
            super().applies(evidence)
            or self.absent(evidence.trained)
            or unnamed(evidence.sources, *self.named_by)
        )

    def unseen(self, evidence: Evidence) -> str:
        reason = super().unseen(evidence) if went_through(evidence) else ""
        return reason or (never_sharded(evidence) if self.policy(NeedsSharding) else "")

    def absent(self, train: Run) -> str:
        """Why a train run that completed has nothing of the kind; "" if it has."""
        return ""

    def judge(self, evidence: Evidence) -> Finding:
        if (found := self._raised(evidence)) is not None:
            run, cause = found
            # Files of each rank may not fit a number of ranks that nobody asked for (exam e_07,
            # e_12). An error on a number of ranks that nobody asked for (files of each rank that do
            # not fit there) is a warning (exam round 2 e_07_recsys_ignored, e_12_ssm_hook_optim:
            # per-rank files).
            decides = run.role != "reshard" or evidence.course.sizes_chosen
            return self.failed(
                f"the {run.role} run stopped: {cause.text}",
                self.place(run, cause),
                required=decides,
            )
        if evidence.train is None or evidence.train.steps() == 0:
            return self.unknown(
                "the train run made no optimizer step, and this error is not the reason"
            )
        return self.passed("no run was stopped by this error")

    def _raised(self, evidence: Evidence) -> tuple[Run, RootCause] | None:
        """The run that was stopped by this error, and the error."""
        causes = ((run, root_cause(run)) for run in trainings(evidence) if not run.completed)
        return next(
            ((r, c) for r, c in causes if re.search(self.pattern, c.error) and self.fits(r, c)),
            None,
        )

    def fits(self, run: Run, cause: RootCause) -> bool:
        """Whether the error is this rule's, beyond its text."""
        return not self.policy(AfterSharding) or run.line_of(Shard) is not None

    def place(self, run: Run, cause: RootCause) -> Place | None:
        """The user's line to change."""
        return cause.location

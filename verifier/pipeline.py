"""The whole verification, from a target to a verdict: plan, execute, judge."""

import contextlib
import functools
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from . import stages
from .analysis.platform import spawns
from .analysis.suggestion import arguments, in_a_copy
from .compare_windows import with_windows
from .config.commands import with_checkpoints
from .config.launchers import HERE, most_on_a_machine
from .config.policy import BY_QUICK
from .config.settings import applied
from .config.target import ON_CPU, Target
from .errors import INTERRUPTED, Interrupted, MachineRefuses, UserError
from .evidence import NOT_QUICK, Course, Evidence
from .execute import Executor, Progress, backend_for
from .finding import Finding
from .isolation.choose import AUTO, in_words, must_isolate
from .isolation.refusal import sized
from .isolation.world import COPY
from .isolation.worlds import Worlds, wish
from .judge import apply_policy, judge, judge_one
from .launch.backend_probe import average_of_one_and_two
from .launch.client import Launcher
from .launch.devices import too_few
from .launch.planned import PlannedRun
from .launch.preparation import prepare
from .report.assemble import assemble, environment_of, notes
from .report.redacted import given_secrets, redacted
from .report.text import place
from .rules import RULES
from .rules.lint import choose, verdict_on
from .rules.naming import left
from .source.options import options_of
from .source.scan import is_distributed, with_sources, with_texts, with_training
from .stages import Settings
from .trace import Run
from .trace.events import Start
from .verdict import CutShort, Verdict


def verify(
    target: Target,
    work: Path,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    python: str = sys.executable,
    progress: Progress = lambda line, going: None,
    tier: str = "ranks",
) -> Verdict:
    """Run the target in every role that the tier allows, under `work`, and judge.

    Every launch is bounded by `target.timeout`.

    Where the environment cannot run ranks, the verdict is that of the other tiers. Raises
    CutShort, with the verdict so far.
    """
    chosen = select(only, (*skip, *target.policy.skipped), tier)
    left_out = [rule for rule in select(only, (), tier) if rule not in chosen]
    secrets = given_secrets(target.describe())
    one = Verification(target, work, chosen, _without(secrets, progress), tier)
    try:
        verdict = _launched(one, python)
    except KeyboardInterrupt as stop:
        code = stop.code if isinstance(stop, Interrupted) else INTERRUPTED
        name = signal.Signals(code - 128).name
        part = replace(
            one.part(f"interrupted by {name} before it could be judged"), interrupted=name
        )
        part = apply_policy(part.decided(), target.policy, left_out)
        raise CutShort(code, redacted(part, secrets)) from None
    except MachineRefuses as error:
        part = one.part(f"environment error: {error}")
        verdict = replace(part, refused=str(error)).decided()
    return redacted(apply_policy(verdict, target.policy, left_out), secrets)


def verify_with(
    launcher: Launcher,
    target: Target,
    work: Path,
    chosen: Collection[str],
    progress: Progress = lambda line, going: None,
    tier: str = "ranks",
    files: Worlds | None = None,
) -> Verdict:
    """`verify` with a launcher that is already there; `chosen` rules say which roles are run.

    `files`: the worlds of its runs; without them the script runs in place.
    """
    return Verification(target, work, chosen, progress, tier).verdict(launcher, files)


def _without(secrets: tuple[str, ...], progress: Progress) -> Progress:
    """What is reported before there is a verdict."""
    return lambda line, going: progress(redacted(line, secrets), redacted(going, secrets))


def _launched(one: "Verification", python: str) -> Verdict:
    """The verdict, with a launcher of its own."""
    target, work = one.target, one.work
    if one.tier == "static":
        return one.static()
    work.mkdir(parents=True, exist_ok=True)
    ranks = most_on_a_machine(target.launcher, (target.nproc, *target.reshard_to, 1), os.environ)
    device = "cpu" if one.tier == "simulate" or target.device == ON_CPU else target.device
    with ExitStack() as stack:
        wanted = wish(work, *target.folders, target.cwd, mechanism=_isolation(target))
        launcher = Launcher(
            python, work / "launcher.log", device, ranks, target.oversubscribe, wanted
        )
        stack.push(launcher)
        one.known = read(target)  # while the launcher imports torch
        launcher.wait()
        one.about["isolation"] = in_words(asdict(launcher.choice), target.allow_writes)
        must_isolate(launcher.choice, target.isolation)
        files = Worlds(work, target.folders, target.cwd, launcher.choice, target.allow_writes)
        if target.prepare:
            one.progress("", [f"prepare: {shlex.join(target.prepare)}"])
            prepare(launcher, files, [python, *target.prepare], target.timeout)
        try:
            return one.verdict(launcher, files)
        except MachineRefuses as error:
            # a simulated rank must see no GPU
            if one.tier == "simulate" or one.ended or launcher.versions["devices"]:
                raise
            with contextlib.suppress(MachineRefuses):
                return one.simulated(str(error)).verdict(launcher)
            raise


@dataclass
class Verification:
    """What is verified, and what is known of it so far; `chosen` rules say which roles are run.

    `refused`: why ranks cannot be run, where only the simulated tier runs; more rules are then
    inconclusive. `known`: what the sources show. `about`: what is known of the environment.
    """

    target: Target
    work: Path
    chosen: Collection[str]
    progress: Progress = lambda line, going: None
    tier: str = "ranks"
    refused: str = ""
    known: Evidence | None = None
    about: dict[str, str] = field(default_factory=dict)
    executor: Executor | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> list[Run]:
        """The runs that have ended, but for those that were made again."""
        return self.executor.ended if self.executor is not None else []

    def simulated(self, refused: str) -> "Verification":
        """The same in the simulated tier."""
        work = self.work / "simulated"
        return replace(self, work=work, tier="simulate", refused=refused, executor=None)

    def static(self) -> Verdict:
        target = self.target
        checkouts = target.policy.checkouts
        return verdict_on(target.describe(), target.script, self.chosen, checkouts)

    def verdict(self, launcher: Launcher, files: Worlds | None = None) -> Verdict:
        """Make the runs, and judge them."""
        if self.tier == "static":
            return self.static()
        target, work, started = self.target, self.work, time.monotonic()
        files = files or Worlds(
            work, target.folders, target.cwd, launcher.choice, target.allow_writes
        )
        ranks = max(target.nproc, *target.reshard_to, 1)
        backend = backend_for(launcher, ranks, target.oversubscribe, work)
        self.executor = Executor(launcher, work, files, self.progress, backend, target.budget)
        self.known = self.known or read(target)
        gpus = int(launcher.versions["devices"])
        settings = planned(target, self.chosen, self.tier, gpus, spawns(self.known.sources))
        evidence = with_texts(gather(settings, self.executor, self.known))
        if self.tier == "ranks" and "gloo-avg-is-sum" in self.chosen and self.executor.averages:
            evidence = replace(evidence, average=average_of_one_and_two(launcher, work / "average"))
        findings, skipped = self._judged(evidence)
        environment = self._environment(launcher, files, backend, evidence)
        made = evidence.train.steps() if evidence.train is not None else 0
        described = replace(target, steps=target.steps or made).describe()
        verdict = assemble(described, work, evidence, evidence.runs, findings, environment)
        return replace(
            verdict,
            suggestion=suggestion(target, evidence),
            folder=str(work),
            seconds=time.monotonic() - started,
            refused=self.refused,
            skipped=skipped,
        ).decided()

    def _judged(self, evidence: Evidence) -> tuple[list[Finding], list[dict[str, Any]]]:
        """The findings, and the rules that `--quick` leaves out."""
        simulated = self.tier == "simulate"
        unseen = [name for name in self.chosen if simulated and not RULES[name].simulated]
        beyond = dict.fromkeys(unseen, f"environment error: {self.refused}")
        findings, skipped = [], []
        for finding in judge(evidence, self.chosen, beyond):
            if finding.part == NOT_QUICK.part:
                skipped.append({"rule": finding.rule, "reason": BY_QUICK, "until": None})
                continue
            ours = finding.tier == "ranks" and finding.rule not in unseen
            findings.append(replace(finding, tier=self.tier) if ours else finding)
        return findings, skipped

    def _environment(
        self, launcher: Launcher, files: Worlds, backend: str, evidence: Evidence
    ) -> dict[str, Any]:
        target = self.target
        forked = target.script if target.launcher == "fork" else None
        remarks = notes(forked, evidence, files.notes())
        if evidence.cuda_on_cpu and (gpus := too_few(launcher.versions.get("unused", 0))):
            remarks.append(gpus)
        if asks_for_checkpoints(target, evidence) and (how := in_a_copy(evidence)):
            remarks.append(how)
        versions = launcher.versions | {
            "isolation": in_words(asdict(launcher.choice), target.allow_writes)
        }
        if files.largest:
            took = f"{files.work.parent}: {sized(files.largest)} in the largest run"
            versions["temporary_folder"] = took
        return environment_of(
            versions,
            self.tier,
            backend,
            target.nproc,
            target.launcher,
            remarks,
            evidence.cuda_on_cpu,
        )

    def part(self, reason: str) -> Verdict:
        """The verdict where not all could be run: what the sources show, and the rules that need
        no run but the first.
        """
        ended = self.ended
        train = next((run for run in ended if run.role == "train"), None)
        evidence = self.known or read(self.target)
        evidence = evidence if train is None else evidence.having("train", train)
        enough = {"train"} if train is not None else set()
        beyond = {rule: reason for rule in self.chosen if not RULES[rule].needs <= enough}
        torch = next((r.torch for run in ended for r in run.all(Start)), "not known yet")
        environment = {
            "torch": torch,
            "python": platform.python_version(),
            "platform": platform.platform(),
            **self.about,
        }
        findings = judge(evidence, self.chosen, beyond)
        described = self.target.describe()
        verdict = assemble(described, self.work, evidence, ended, findings, environment)
        return replace(verdict, seconds=time.monotonic() - self.started)


def _isolation(target: Target) -> str:
    """How runs are to be isolated: ranks on several machines have one folder in common, not one
    namespace.
    """
    far = target.launcher not in HERE and target.isolation == AUTO
    return COPY if far else target.isolation


def suggestion(target: Target, evidence: Evidence) -> str:
    """The command that judges the script's checkpoints, too, where its options show how it saves
    and resumes.
    """
    if not asks_for_checkpoints(target, evidence):
        return ""
    save, resume = arguments(evidence)
    try:  # as the next verification would
        for words in (save, resume):
            applied((*target.args, *shlex.split(words)), target.cwd, "", Path())
    except (UserError, ValueError):
        return ""
    given = target.command
    before = given[: given.index("--")] if "--" in given else given
    return with_checkpoints(before, save, resume, target.args) if save else ""


def asks_for_checkpoints(target: Target, evidence: Evidence) -> bool:
    """Whether the script saves, and was given no arguments for it."""
    given = target.save_args or target.resume_args or target.name
    return not given and evidence.saving is not None


def planned(
    target: Target,
    chosen: Collection[str],
    tier: str = "ranks",
    gpus: int = 0,
    spawns: bool = False,
) -> Settings:
    """What the plan is made from; `gpus`: how many this machine has; `spawns`: whether the script
    starts its ranks itself.
    """
    return Settings(
        target,
        chosen,
        tier,
        bool(target.reference) and is_distributed(Path(target.reference[0])),
        cuda_on_cpu=target.full_size or target.device == ON_CPU,
        gpus=gpus,
        spawns=spawns,
    )


def read(target: Target) -> Evidence:
    """What the sources show, before any run."""
    course = Course(sizes_chosen=target.sizes_chosen, resumes=bool(target.resume_args))
    evidence = Evidence(tolerances=target.policy.tolerances, course=course, watch=target.watch)
    root = target.project if target.module or target.root else None
    evidence = with_sources(evidence, target.script, root, target.policy.checkouts)
    return replace(evidence, options=options_of(evidence.sources, target.args, target.cwd))


def gather(settings: Settings, executor: Executor, evidence: Evidence) -> Evidence:
    """The runs that the rules need, stage by stage: each says which are due after what the earlier
    ones have shown.
    """
    evidence = replace(evidence, cuda_on_cpu=settings.cuda_on_cpu)
    for stage in stages.stages(settings.tier):
        while due := _due(stage, settings, evidence):
            made = executor.make(settings.ordered(due))
            runs = [one.run for one in made if one.run is not None]
            if (other := stages.restart(settings, evidence, runs)) is not None:
                executor.discard(made)
                settings = other
                evidence = replace(evidence, cuda_on_cpu=settings.cuda_on_cpu)
                continue
            evidence = stages.added(evidence, made, executor.files)
        settings = settings.with_steps(evidence)
        if stage is stages.FIRST:
            target = settings.target
            evidence = with_training(evidence, target.script, target.policy.checkouts)
            report_early(settings, evidence, executor.progress)
    if settings.tier == "simulate":
        return evidence
    return with_windows(settings, executor, stages.completed(settings, evidence))


def _due(stage: stages.Stage, settings: Settings, evidence: Evidence) -> list[PlannedRun]:
    """The runs of a stage that are due now."""
    due = stage(settings, evidence, so_far(settings, evidence))
    return [run for run in due if run.role not in evidence.missing]


def so_far(settings: Settings, evidence: Evidence) -> stages.Found:
    """What a rule finds in the runs so far; each is judged once, and only if it is asked."""

    @functools.cache
    def known() -> Evidence:
        return stages.completed(settings, evidence)

    return functools.cache(lambda rule: judge_one(RULES[rule], known()))


def report_early(settings: Settings, evidence: Evidence, progress: Progress) -> None:
    """Report the rules that fail by the train run alone, before later runs begin."""
    simulated = settings.tier == "simulate"
    early = [name for name in settings.chosen if RULES[name].needs <= {"train"}]
    early = [name for name in early if RULES[name].simulated or not simulated]
    for finding in judge(with_texts(evidence), early):
        if finding.status in ("fail", "error") and not finding.consequence:
            where = f" at {place(finding.location)}" if finding.location else ""
            word = "WARNING" if finding.warns else finding.status.upper()
            progress(f"{word} {finding.rule}{where}: {finding.evidence}", ())


def select(only: Collection[str], skip: Collection[str], tier: str = "ranks") -> list[str]:
    """The names of the rules to judge; both lists may name rules or families.

    Raises UserError on an unknown name.
    """
    if tier == "static":
        return choose(only, skip)
    return left(
        (name for name, rule in RULES.items() if tier != "simulate" or rule.simulated), only, skip
    )

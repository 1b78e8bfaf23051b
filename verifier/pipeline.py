"""The whole verification, from a target to a verdict: plan, execute, judge."""

import contextlib
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from . import stages
from .analysis.platform import asks_for_cuda
from .analysis.steps_to_compare import own_steps, prepares_before_sharding, steps_without_backward
from .config.launchers import HERE, most_on_a_machine
from .config.option import command
from .config.policy import QUICK
from .config.target import Target
from .errors import INTERRUPTED, Interrupted, MachineRefuses
from .evidence import Course, Evidence
from .execute import Executor, Made, Progress, added, backend_for
from .isolation.choose import AUTO, in_words, must_isolate
from .isolation.refusal import sized
from .isolation.world import COPY
from .isolation.worlds import Worlds, wish
from .judge import apply_policy, judge
from .launch.backend_probe import average_of_one_and_two
from .launch.client import Launcher
from .launch.devices import too_few
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
    started = time.monotonic()
    ended, about = list[Run](), dict[str, str]()
    secrets = given_secrets(target.describe())
    try:
        verdict = _verified(
            target, work, chosen, python, _without(secrets, progress), tier, ended, about
        )
    except KeyboardInterrupt as stop:
        code = stop.code if isinstance(stop, Interrupted) else INTERRUPTED
        name = signal.Signals(code - 128).name
        part = _part(
            target, work, chosen, ended, f"interrupted by {name} before it could be judged", about
        )
        part = replace(part, interrupted=name, seconds=time.monotonic() - started)
        part = apply_policy(part.decided(), target.policy, left_out)
        raise CutShort(code, redacted(part, secrets)) from None
    except MachineRefuses as error:
        part = _part(target, work, chosen, ended, f"environment error: {error}", about)
        verdict = replace(part, refused=str(error), seconds=time.monotonic() - started).decided()
    return redacted(apply_policy(verdict, target.policy, left_out), secrets)


def _without(secrets: tuple[str, ...], progress: Progress) -> Progress:
    """What is reported before there is a verdict."""
    return lambda line, going: progress(redacted(line, secrets), redacted(going, secrets))


def _verified(
    target: Target,
    work: Path,
    chosen: Collection[str],
    python: str,
    progress: Progress,
    tier: str,
    ended: list[Run],
    about: dict[str, str],
) -> Verdict:
    """`about`: what is known of the environment before there is a verdict."""
    if tier == "static":
        return verdict_on(target.describe(), target.script, chosen)
    work.mkdir(parents=True, exist_ok=True)
    ranks = most_on_a_machine(target.launcher, (target.nproc, *target.reshard_to, 1), os.environ)
    device = "cpu" if tier == "simulate" else target.device
    with ExitStack() as stack:
        wanted = wish(work, *target.folders, target.cwd, mechanism=_isolation(target))
        launcher = Launcher(
            python, work / "launcher.log", device, ranks, target.oversubscribe, wanted
        )
        stack.push(launcher)
        known = read(target)  # while the launcher imports torch
        launcher.wait()
        about["isolation"] = in_words(asdict(launcher.choice), target.allow_writes)
        must_isolate(launcher.choice, target.isolation)
        files = Worlds(work, target.folders, target.cwd, launcher.choice, target.allow_writes)
        if target.prepare:
            progress("", [f"prepare: {shlex.join(target.prepare)}"])
            prepare(launcher, files, [python, *target.prepare], target.timeout)
        try:
            return verify_with(
                launcher, target, work, chosen, progress, tier, ended, files=files, known=known
            )
        except MachineRefuses as error:
            if (
                tier == "simulate" or ended or launcher.versions["devices"]
            ):  # a simulated rank must see no GPU
                raise
            with contextlib.suppress(MachineRefuses):
                return verify_with(
                    launcher,
                    target,
                    work / "simulated",
                    chosen,
                    progress,
                    "simulate",
                    None,
                    str(error),
                )
            raise


def verify_with(
    launcher: Launcher,
    target: Target,
    work: Path,
    chosen: Collection[str],
    progress: Progress = lambda line, going: None,
    tier: str = "ranks",
    ended: list[Run] | None = None,
    refused: str = "",
    files: Worlds | None = None,
    known: Evidence | None = None,
) -> Verdict:
    """`verify` with a launcher that is already there; `chosen` rules say which roles are run.

    Runs are added to `ended`. `refused`: why ranks cannot be run, where only the simulated tier
    runs; more rules are then inconclusive. `files`: the worlds of its runs; without them the script
    runs in place. `known`: what the sources show, where they have been read.
    """
    if tier == "static":
        return verdict_on(target.describe(), target.script, chosen)
    started = time.monotonic()
    files = files or Worlds(work, target.folders, target.cwd, launcher.choice, target.allow_writes)
    ranks = max(target.nproc, *target.reshard_to, 1)
    backend = backend_for(launcher, ranks, target.oversubscribe, work)
    executor = Executor(launcher, work, files, progress, ended, backend, target.budget)
    executor.cuda_on_cpu = target.full_size
    known = replace(known or read(target), cuda_on_cpu=target.full_size)
    evidence = gather(planned(target, chosen, tier), executor, known)
    evidence = with_texts(evidence)
    if tier == "ranks" and "gloo-avg-is-sum" in chosen and executor.averages:
        evidence = replace(evidence, average=average_of_one_and_two(launcher, work / "average"))
    unseen = [name for name in chosen if tier == "simulate" and not RULES[name].simulated]
    findings = judge(evidence, chosen, dict.fromkeys(unseen, f"environment error: {refused}"))
    findings = [
        replace(f, tier=tier) if f.tier == "ranks" and f.rule not in unseen else f for f in findings
    ]
    left = [f for f in findings if f.status == "inconclusive" and f.evidence == stages.NOT_QUICK]
    findings = [f for f in findings if f not in left]
    remarks = notes(target.script if target.launcher == "fork" else None, evidence, files.notes())
    if evidence.cuda_on_cpu and (gpus := too_few(launcher.versions.get("unused", 0))):
        remarks.append(gpus)
    took = (
        f"{files.work.parent}: {sized(files.largest)} in the largest run" if files.largest else ""
    )
    versions = launcher.versions | {
        "isolation": in_words(asdict(launcher.choice), target.allow_writes)
    }
    versions |= {"temporary_folder": took} if took else {}
    environment = environment_of(
        versions, tier, backend, target.nproc, target.launcher, remarks, evidence.cuda_on_cpu
    )
    made = evidence.train.steps() if evidence.train is not None else 0
    described = replace(target, steps=target.steps or made).describe()
    verdict = assemble(described, work, evidence, evidence.runs, findings, environment)
    verdict = replace(verdict, suggestion=suggestion(target, evidence))
    skipped = [{"rule": f.rule, "reason": QUICK, "until": None} for f in left]
    seconds = time.monotonic() - started
    return replace(
        verdict, folder=str(work), seconds=seconds, refused=refused, skipped=skipped
    ).decided()


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
    if target.save_args or target.resume_args or target.name or evidence.saving is None:
        return ""
    words = (
        target.command[: target.command.index("--")] if "--" in target.command else target.command
    )
    return command(words, evidence.options, target.args)


def planned(target: Target, chosen: Collection[str], tier: str = "ranks") -> Settings:
    """What the plan is made from."""
    return Settings(
        target, chosen, tier, bool(target.reference) and is_distributed(Path(target.reference[0]))
    )


def read(target: Target) -> Evidence:
    """What the sources show, before any run."""
    course = Course(sizes_chosen=target.sizes_chosen, resumes=bool(target.resume_args))
    evidence = Evidence(tolerances=target.policy.tolerances, course=course, watch=target.watch)
    evidence = with_sources(
        evidence, target.script, target.project if target.module or target.root else None
    )
    return replace(evidence, options=options_of(evidence.sources, target.args, target.cwd))


def gather(settings: Settings, executor: Executor, evidence: Evidence) -> Evidence:
    """The runs that the rules need, stage by stage: each says which are due after what the earlier
    ones have shown.
    """
    target = settings.target
    for stage in stages.stages(settings.tier):
        while due := [run for run in stage(settings, evidence) if run.role not in evidence.missing]:
            made = executor.make(settings.ordered(due))
            if evidence.train is None and _stopped_for_want_of_cuda(target, executor, made):
                executor.cuda_on_cpu = True
                executor.ended.clear()  # this run says nothing of the script
                evidence = replace(evidence, cuda_on_cpu=True)
                continue
            if stage is stages.first and not settings.from_sharding_on and _prepares(made):
                settings = replace(settings, from_sharding_on=True)
                executor.ended.pop()  # it has recorded the models as they were before
                continue
            if stage is stages.first and (how := _own_steps(settings, made)):
                steps = (
                    target.steps or steps_without_backward(evidence)
                    if how == "forwards"
                    else settings.target.steps
                )
                settings = replace(
                    settings, target=replace(settings.target, steps=steps), own_steps=how
                )
                executor.ended.pop()
                continue
            evidence = added(evidence, made, executor.files)
        settings = settings.with_steps(evidence)
        if stage is stages.first:
            evidence = with_training(evidence, target.script)
            report_early(settings, evidence, executor.progress)
    return evidence if settings.tier == "simulate" else stages.completed(settings, evidence)


def _stopped_for_want_of_cuda(target: Target, executor: Executor, made: Sequence[Made]) -> bool:
    """Whether the first run ended where the script asks for CUDA, and may be made again with one
    that computes on the CPU.
    """
    if target.device != "auto" or executor.cuda_on_cpu or executor.launcher.versions["devices"]:
        return False
    return any(one.run is not None and asks_for_cuda(one.run) for one in made)


def _prepares(made: Sequence[Made]) -> bool:
    """Whether the train run is to be made again, without what the script does before it shards."""
    return any(one.run is not None and prepares_before_sharding(one.run) for one in made)


def _own_steps(settings: Settings, made: Sequence[Made]) -> str:
    """Where the steps of the train run end, if it has to be made again for it; "each" if by their
    samples the ranks parted.
    """
    runs = [one.run for one in made if one.run is not None]
    if settings.own_steps in ("backwards", "forwards"):
        apart = any(
            not run.completed or len({len(trace.stepped) for trace in run.traces}) > 1
            for run in runs
        )
        return "each" if apart else ""
    return next((how for run in runs if not settings.own_steps and (how := own_steps(run))), "")


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


def _part(
    target: Target,
    work: Path,
    chosen: Collection[str],
    ended: Sequence[Run],
    reason: str,
    about: Mapping[str, str],
) -> Verdict:
    """The verdict where not all could be run: what the sources show, and the rules that need no run
    but the first.
    """
    # the one with CUDA on the CPU, if there are two
    train = next((run for run in reversed(ended) if run.role == "train"), None)
    evidence = replace(read(target), train=train)
    enough = {"train"} if train is not None else set()
    beyond = {rule: reason for rule in chosen if not RULES[rule].needs <= enough}
    torch = next((r.torch for run in ended for r in run.all(Start)), "not known yet")
    environment = {
        "torch": torch,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **about,
    }
    return assemble(
        target.describe(), work, evidence, ended, judge(evidence, chosen, beyond), environment
    )


def select(only: Collection[str], skip: Collection[str], tier: str = "ranks") -> list[str]:
    """The names of the rules to judge; both lists may name rules or families.

    Raises UserError on an unknown name.
    """
    if tier == "static":
        return choose(only, skip)
    return left(
        (name for name, rule in RULES.items() if tier != "simulate" or rule.simulated), only, skip
    )

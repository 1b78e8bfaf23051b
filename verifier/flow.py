"""The whole verification, from a target to a verdict: which runs are made, in which order, and what the rules say."""

from __future__ import annotations

import contextlib
import platform
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .blame import blame
from .errors import INTERRUPTED, Interrupted, MachineRefuses, text_of
from .evidence import Evidence
from .facts import facts, summary
from .finding import Finding, Verdict
from .launch.average import average_of_one_and_two
from .launch.client import Launcher
from .modules import root
from .origin import place_in_ours
from .policy import decided, widened
from .resume_runs import open_saves, resume_runs
from .rules import RULES
from .rules.base import Rule
from .rules.naming import left
from .rules.precision import LOW, low_precision
from .runner import Pending, Progress, Runner
from .stable import stable
from .static import project_files
from .static.lint import look
from .static.suppress import RULE as UNUSED
from .static.suppress import problems
from .static.verdict import choose, settled, verdict_on
from .target import Target
from .trace import Run
from .trace.events import ProbeError

TIERS = ("static", "simulate", "ranks")
LISTENED = ("wrapping", "init", "mesh")  # families of rules whose listeners keep their own errors to themselves
SIMULATED_STEPS = 2  # the first step of a run also initialises


def verify(
    target: Target,
    work: Path,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    python: str = sys.executable,
    progress: Progress = lambda line, going: None,
    tier: str = "ranks",
) -> Verdict:
    """Run the target in every role that the tier allows, under `work`, and judge. Every launch is bounded by `target.timeout`.

    Where this machine lets no ranks run, the verdict is that of the other tiers. Raises Interrupted, with the verdict so far.
    """
    chosen = select(only, (*skip, *target.policy.skipped), tier)
    left_out = [rule for rule in select(only, (), tier) if rule not in chosen]
    started = time.monotonic()
    ended: list[Run] = []
    try:
        verdict = _verified(target, work, chosen, python, progress, tier, ended)
    except KeyboardInterrupt as stop:
        code = stop.code if isinstance(stop, Interrupted) else INTERRUPTED
        name = signal.Signals(code - 128).name
        reason = f"interrupted by {name} before it could be judged"
        verdict = so_far(target, work, chosen, ended, reason, time.monotonic() - started, interrupted=name)
        raise Interrupted(code, decided(verdict, target.policy, left_out)) from None
    except MachineRefuses as error:
        reason = f"this machine refuses: {error}"
        verdict = so_far(target, work, chosen, ended, reason, time.monotonic() - started, refused=str(error))
    return decided(verdict, target.policy, left_out)


def _verified(
    target: Target, work: Path, chosen: Collection[str], python: str, progress: Progress, tier: str, ended: list[Run]
) -> Verdict:
    if tier == "static":
        return verdict_on(target.describe(), target.script, chosen)
    work.mkdir(parents=True, exist_ok=True)
    ranks = max(target.nproc, *target.reshard_to, 1)
    device = "cpu" if tier == "simulate" else target.device
    with Launcher(python, work / "launcher.log", device, ranks, target.oversubscribe) as launcher:
        try:
            return verify_with(launcher, target, work, chosen, progress, tier, ended)
        except MachineRefuses as error:
            if tier == "simulate" or ended or launcher.versions["devices"]:  # a simulated rank must see no GPU
                raise
            with contextlib.suppress(MachineRefuses):
                return verify_with(launcher, target, work / "simulated", chosen, progress, "simulate", None, str(error))
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
) -> Verdict:
    """`verify` with a launcher that is already there; `chosen` rules say which roles are run.

    Runs are added to `ended`. `refused`: why ranks cannot be run, where the simulated tier is all there is; more rules are then open.
    """
    if tier == "static":
        return verdict_on(target.describe(), target.script, chosen)
    started = time.monotonic()
    needs = frozenset[str]().union(*(RULES[name].needs for name in chosen))
    runner = Runner(launcher, target, work, progress, ended)
    evidence = simulate(target, runner) if tier == "simulate" else gather(target, runner, needs)
    if tier == "ranks" and "gloo-avg-is-sum" in chosen:
        evidence = replace(evidence, average=average_of_one_and_two(launcher, work))
    evidence = replace(with_sources(evidence, target.script), tolerances=target.policy.tolerances)
    beyond = [name for name in chosen if tier == "simulate" and not RULES[name].simulated]
    environment = {**launcher.versions, "platform": platform.platform(), "backend": runner.backend(tier)}
    environment |= {"launcher": target.launcher, "notes": [*runner.notes(), *adapted(evidence)]}
    findings = [
        replace(
            f,
            tier=tier if f.tier == "ranks" and f.rule not in beyond else f.tier,
            evidence=stable(f.evidence, work),
        )
        for f in judge(evidence, chosen, beyond, f"this machine refuses: {refused}")
    ]
    verdict = Verdict(
        verdict="inconclusive",
        target=target.describe(),
        environment=environment,
        runs=[summary(run) for run in evidence.runs],
        findings=findings,
        facts=facts(evidence, work),
        folder=str(work),
        seconds=time.monotonic() - started,
        refused=refused,
    )
    return replace(verdict, verdict=verdict.of(findings))


def so_far(
    target: Target,
    work: Path,
    chosen: Collection[str],
    ended: Sequence[Run],
    reason: str,
    seconds: float,
    interrupted: str = "",
    refused: str = "",
) -> Verdict:
    """The verdict where not all could be run: what the sources show, and the rules that want no run but the first.

    The others are open for this reason.
    """
    train = next((run for run in ended if run.role == "train"), None)
    evidence = replace(with_sources(Evidence(train=train), target.script), tolerances=target.policy.tolerances)
    enough = {"train"} if train is not None else set()
    beyond = [rule for rule in chosen if not RULES[rule].needs <= enough]
    torch = next((r["torch"] for run in ended for trace in run.traces for r in trace.of("start")), "not known yet")
    findings = [replace(f, evidence=stable(f.evidence, work)) for f in judge(evidence, chosen, beyond, reason)]
    verdict = Verdict(
        verdict="inconclusive",
        target=target.describe(),
        environment={"torch": torch, "python": platform.python_version(), "platform": platform.platform()},
        runs=[summary(run) for run in ended],
        findings=findings,
        facts=facts(evidence, work),
        seconds=seconds,
        interrupted=interrupted,
        refused=refused,
    )
    return replace(verdict, verdict=verdict.of(findings))


def gather(target: Target, runner: Runner, needs: Collection[str]) -> Evidence:
    """The runs of a target in the roles that are needed. A role that cannot be run is missing, with its reason."""
    missing: dict[str, str] = {}
    sources = sources_of(target)
    train = runner.run(
        "train", target.nproc, target.save_args, fill=True, stress=True, leave_starting_point=True, watch_saves=True
    )
    evidence = Evidence(train=train, missing=missing, sources=sources)
    if not train.completed or train.steps() == 0:
        reason = (
            "the train run did not complete (see run-completes)"
            if not train.completed
            else "the train run made no step"
        )
        missing |= dict.fromkeys(
            ("exact", "reference", "single", "original", "opened", "resume", "reshard", "crash"), reason
        )
        return evidence
    exact = _needs_exact(train)

    def start(role: str, world: int, extra: tuple[str, ...] = (), **options: Any) -> Pending | None:
        return runner.start(role, world, extra, exact=exact, **options) if role in needs else None

    def run(role: str, world: int, extra: tuple[str, ...] = (), **options: Any) -> Run | None:
        return ended(start(role, world, extra, **options))

    def ended(pending: Pending | None) -> Run | None:
        return pending.run if pending is not None else None

    twin = start("exact", target.nproc) if exact else None
    first = start("reference", target.nproc, mode="ddp")
    alone = start("single", 1, target.single_args, mode="ddp")
    plain, rounded = _in_low_precision(target, runner, train, needs)
    reference = ended(first)
    by_hand = reference is not None and not reference.completed and "AttributeError" not in blame(reference).error
    if by_hand:  # graphs that DDP's reducer refuses, such as reentrant checkpointing
        reference = run("reference", target.nproc, mode="ddp", by_hand=True)
    reference, way = _without_ddp(run, target.nproc, reference, missing)
    single, mode = ended(alone), "ddp"
    if single is not None and not single.completed:  # what DDP cannot stand in for, fully_shard on one rank may
        mode = "fsdp"
        single = run("single", 1, target.single_args, mode=mode)
    if reference is not None and not reference.completed:  # then the noise of one process is the measure
        envelope = run("envelope", 1, target.single_args, mode=mode, nudge=True)
    else:
        envelope = run("envelope", target.nproc, mode=way, nudge=True, by_hand=by_hand)
    evidence = replace(
        evidence,
        exact=ended(twin) if exact else train,
        plain=plain,
        rounded=rounded,
        reference=reference,
        envelope=envelope,
        single=single,
        original=_original(target, runner, exact) if "original" in needs else None,
    )
    evidence = replace(evidence, opened=open_saves(runner, train) if "opened" in needs else None)
    return resume_runs(target, runner, evidence, exact, needs)


def _original(target: Target, runner: Runner, exact: bool) -> Run | None:
    """The script that this one was converted from: on as many ranks if it is a distributed one, else on one."""
    if not target.reference:
        return None
    script, *args = target.reference
    old = replace(target, script=Path(script), module="", args=tuple(args))
    distributed = any("distributed" in file.read_text(errors="replace") for file in sources_of(old))
    other = Runner(runner.launcher, old, runner.work, runner.progress, runner.ended, runner.sharing)
    return other.run("original", target.nproc if distributed else 1, exact=exact)


def with_sources(evidence: Evidence, script: Path) -> Evidence:
    """The evidence with what the static tier sees in the script."""
    seen = look([script])
    return replace(evidence, hits=seen.by_rule(), suppressions=tuple(seen.suppressions))


def simulate(target: Target, runner: Runner) -> Evidence:
    """One process that takes itself for rank 0 of `target.nproc`: structure and traffic without sockets."""
    run = runner.run("simulate", target.nproc, mode="simulate", steps=SIMULATED_STEPS, fill=True)
    return Evidence(train=run, sources=sources_of(target))


def sources_of(target: Target) -> tuple[Path, ...]:
    """The files of the target's own code."""
    return project_files(target.script, root(target.script, target.module) if target.module else None)


def _without_ddp(
    run: Callable[..., Run | None], world: int, reference: Run | None, missing: dict[str, str]
) -> tuple[Run | None, str]:
    """The reference and its mode: where plain tensors cannot answer what the script asks, each rank shards over itself."""
    if reference is None or reference.completed:
        return reference, "ddp"
    alone = run("reference", world, mode="alone")
    if alone is None or not alone.completed:
        return reference, "ddp"
    missing["ddp"] = blame(reference).text
    return alone, "alone"


def _in_low_precision(
    target: Target, runner: Runner, train: Run, needs: Collection[str]
) -> tuple[Run | None, Run | None]:
    """The runs `plain` and `rounded` of `Evidence`, one step each, where the script computes in low precision."""
    dtype = low_precision(train)
    if dtype is None or "rounded" not in needs:
        return None, None
    dropout = any(r["what"] == "dropout" for t in train.traces for r in t.of("inexact"))
    plain = runner.run("undropped", target.nproc, dropless=True, steps=1) if dropout else train
    return plain, runner.run("rounded", target.nproc, exact=True, round_to=dtype, steps=1)


def _needs_exact(train: Run) -> bool:
    """Whether low-precision compute, autocast or dropout stands between this run and an oracle."""
    low = any(r["param_dtype"] in LOW for r in train.places("shard"))
    return low or any(t.first("inexact") is not None for t in train.traces)


def judge(evidence: Evidence, chosen: Collection[str], beyond: Collection[str] = (), reason: str = "") -> list[Finding]:
    """The findings of the chosen rules. What the static tier saw counts where the runs could not decide.

    The rules `beyond` what was run are open, for this reason.

    A rule of the families that only compare (hang, parity) tells a consequence if a rule that names a cause has failed.
    """
    findings: list[Finding] = []
    broken = {run.role for run in evidence.runs if run.probe_failed}
    for name in chosen:
        started = time.monotonic()
        rule = RULES[name]
        if name == UNUSED:
            decided = {f.rule for f in findings if f.status in ("pass", "fail")}
            evidence = replace(evidence, hits={UNUSED: tuple(problems(evidence.suppressions, RULES, decided))})
        found = rule.unknown(reason) if name in beyond else _judged(rule, evidence, broken)
        if found.status == "inconclusive" and (hits := evidence.hits.get(name)):
            found = rule.failed(hits[0].told, hits[0].location, tier="static")
        if found.status == "pass" and rule.family in LISTENED and (deaf := _unheard(evidence)):
            found = rule.unknown(deaf)
        found = settled(found, evidence.suppressions)
        findings.append(replace(widened(found, evidence.tolerances), seconds=time.monotonic() - started))
    findings += _faults_of_ours(evidence)
    causes = any(f.status == "fail" and RULES[f.rule].names_a_cause for f in findings)
    return [
        replace(f, consequence=True) if causes and f.status == "fail" and not RULES[f.rule].names_a_cause else f
        for f in findings
    ]


def _judged(rule: Rule, evidence: Evidence, broken: Collection[str]) -> Finding:
    """The finding of a rule. An error in it, or a failure in a run that the verifier itself has `broken`, is none of the script's."""
    try:
        found = rule.judge(evidence)
    except Exception as error:
        where = place_in_ours(error)
        return Finding(rule.name, "error", f"{text_of(error)}{f' in {where}' if where else ''}")
    if found.status == "fail" and not rule.needs.isdisjoint(broken):
        return Finding(rule.name, "error", "the verifier itself failed in a run that this rule needs: see `verifier`")
    return found


def _faults_of_ours(evidence: Evidence) -> list[Finding]:
    """An error finding if the probe failed in a run, with the symbol; the rules are judged on what was recorded all the same."""
    told = [f"{run.role} run, {text}" for run in evidence.runs for text in run.probe_errors]
    if not told:
        return []
    more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
    return [Finding("verifier", "error", f"the verifier itself failed: {told[0]}{more}")]


def adapted(evidence: Evidence) -> list[str]:
    """What a library was told so that its own FSDP2 code runs here."""
    records = evidence.train.places("adapted") if evidence.train is not None else ()
    return list(dict.fromkeys(record["told"] for record in records))


def _unheard(evidence: Evidence) -> str:
    """Why the probe did not see all that the rules of LISTENED read; "" if it did."""
    traces = evidence.train.traces if evidence.train is not None else ()
    record = next((r for trace in traces for r in trace.of(ProbeError)), None)
    return f"the probe failed while it listened ({record.symbol}: {record.text})" if record else ""


def select(only: Collection[str], skip: Collection[str], tier: str = "ranks") -> list[str]:
    """The names of the rules to judge; both lists may name rules or families. Raises UserError on an unknown name."""
    if tier == "static":
        return choose(only, skip)
    return left((name for name, rule in RULES.items() if tier != "simulate" or rule.simulated), only, skip)

"""The whole verification, from a target to a verdict: which runs are made, in which order, and what the rules say."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from . import settings
from .errors import MachineRefuses, UserError
from .evidence import Evidence
from .finding import Finding, Verdict, verdict_of
from .launch import sharing
from .launch.client import Launcher
from .launch.request import Request
from .launch.trial import shares_a_gpu
from .modules import root
from .rules import RULES
from .rules.precision import LOW
from .rules.traffic import traffic
from .static import project_files
from .target import Target
from .trace import Run, read_run

GRACE = 8.0
TIERS = ("simulate", "ranks")
SIMULATED_STEPS = 2  # the first step of a run also initialises
Progress = Callable[[str], None]


def verify(
    target: Target,
    work: Path,
    only: Collection[str] = (),
    skip: Collection[str] = (),
    python: str = sys.executable,
    progress: Progress = lambda text: None,
    tier: str = "ranks",
) -> Verdict:
    """Run the target in every role that the tier allows, under `work`, and judge. Every launch is bounded by `target.timeout`."""
    chosen = select(only, skip, tier)
    work.mkdir(parents=True, exist_ok=True)
    ranks = max(target.nproc, *target.reshard_to, 1)
    device = "cpu" if tier == "simulate" else target.device
    with Launcher(python, work / "launcher.log", device, ranks, target.oversubscribe) as launcher:
        return verify_with(launcher, target, work, chosen, progress, tier)


def verify_with(
    launcher: Launcher,
    target: Target,
    work: Path,
    chosen: Collection[str],
    progress: Progress = lambda text: None,
    tier: str = "ranks",
) -> Verdict:
    """`verify` with a launcher that is already there; `chosen` rules say which roles are run."""
    started = time.monotonic()
    needs = frozenset[str]().union(*(RULES[name].needs for name in chosen))
    runner = Runner(launcher, target, work, progress)
    evidence = simulate(target, runner) if tier == "simulate" else gather(target, runner, needs)
    environment = {**launcher.versions, "platform": platform.platform(), "backend": runner.backend(tier)}
    environment |= {"launcher": target.launcher, "notes": runner.notes()}
    findings = [replace(f, tier=tier) if f.tier == "ranks" else f for f in judge(evidence, chosen)]
    return Verdict(
        verdict=verdict_of(findings),
        target=target.describe(),
        environment=environment,
        runs=[summary(run) for run in evidence.runs],
        findings=findings,
        facts=facts(evidence),
        folder=str(work),
        seconds=time.monotonic() - started,
    )


class Runner:
    """Makes the runs of one target, each in a folder of its own."""

    def __init__(self, launcher: Launcher, target: Target, work: Path, progress: Progress) -> None:
        self.launcher = launcher
        self.target = target
        self.work = work
        self.progress = progress
        self.made = 0
        self.going: list[Pending] = []
        self.checkpoint = work / "checkpoint"
        self.saved = work / "checkpoint.saved"
        self.sharing = self._sharing()

    def _sharing(self) -> str:
        ranks, devices = max(self.target.nproc, *self.target.reshard_to, 1), self.launcher.versions["devices"]

        def works(backend: str) -> bool:
            return shares_a_gpu(self.launcher, backend, self.work / f"trial-{backend}")

        found = sharing.decide(ranks, devices, self.target.oversubscribe, works)
        if found == "none":
            raise MachineRefuses(f"{ranks} ranks cannot share {devices} CUDA devices here: neither by NCCL nor by gloo")
        return found

    def backend(self, tier: str) -> str:
        """What carries the collectives, as it stands in the report."""
        devices = self.launcher.versions["devices"]
        if self.sharing:
            return sharing.told(self.sharing, self.target.nproc, devices)
        return "fake" if tier == "simulate" else "nccl" if devices else "gloo"

    def notes(self) -> list[str]:
        """What a reader must know of how the runs were made."""
        told = settings.note(self.target.script) if self.target.launcher == "fork" else ""
        return [told] if told else []

    def run(self, role: str, world: int, extra: tuple[str, ...] = (), steps: int | None = None, **options: Any) -> Run:
        """One launch in a role, to its end. `options` are further fields of the Request."""
        return self.start(role, world, extra, steps, **options).run

    def start(
        self, role: str, world: int, extra: tuple[str, ...] = (), steps: int | None = None, **options: Any
    ) -> Pending:
        """Begin a launch beside those that go on, as far as there is a core (or device) for each rank; else after them."""
        while self.going and sum(other.world for other in self.going) + world > self.room:
            _ = self.going[0].run
        self.made += 1
        folder = self.work / f"{self.made:02}-{role}-{world}"
        folder.mkdir(parents=True)
        shared = role in ("train", "resume", "continued", "reshard")
        checkpoint = self.checkpoint if shared else folder / "scratch"
        checkpoint.mkdir(exist_ok=True)
        target = self.target
        argv = [word.replace("{checkpoint}", str(checkpoint)) for word in (*self.target.args, *extra)]
        planned = Request(
            folder=str(folder),
            script=str(target.script),
            cwd=str(target.cwd),
            world_size=world,
            argv=argv,
            module=target.module,
            project=str(root(target.script, target.module)),
            launcher=target.launcher,
            backend=self.sharing,
            timeout=target.timeout,
            grace=min(GRACE, target.timeout),
            steps=steps or target.steps,
            starting_point=str(self.work / "starting_point"),
        )
        request = replace(planned, **options)
        words = ["-m", target.module] if target.module else [target.script.name]
        pending = Pending(self, role, request, " ".join([*words, *argv]), self.launcher.start(request))
        self.going.append(pending)
        return pending

    @cached_property
    def room(self) -> int:
        """How many ranks may go on at a time."""
        return int(self.launcher.versions["devices"]) or len(os.sched_getaffinity(0))

    def keep_checkpoint(self) -> None:
        """Put the train run's checkpoint aside, so that every resumed run finds it as it was saved."""
        shutil.copytree(self.checkpoint, self.saved)

    def restore_checkpoint(self) -> None:
        """Bring the checkpoint back as the train run left it."""
        shutil.rmtree(self.checkpoint)
        shutil.copytree(self.saved, self.checkpoint)


class Pending:
    """A run that has begun; `run` waits for its end."""

    def __init__(self, runner: Runner, role: str, request: Request, command: str, number: int) -> None:
        self._runner = runner
        self._role = role
        self._request = request
        self._command = command
        self._number = number
        self.world = request.world_size

    @cached_property
    def run(self) -> Run:
        """What the run left behind."""
        answer = self._runner.launcher.finish(self._number)
        self._runner.going.remove(self)
        run = read_run(Path(self._request.folder), self._role, answer, self.world, self._command)
        ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
        ending = "" if run.completed else "  did not complete"
        self._runner.progress(f"{self._role:<10} {ranks:<8} {run.steps():>3} steps {run.seconds:6.1f} s{ending}")
        return run


def gather(target: Target, runner: Runner, needs: Collection[str]) -> Evidence:
    """The runs of a target in the roles that are needed. A role that cannot be run is missing, with its reason."""
    missing: dict[str, str] = {}
    sources = sources_of(target)
    train = runner.run("train", target.nproc, target.save_args, stress=True, leave_starting_point=True)
    evidence = Evidence(train=train, missing=missing, sources=sources)
    if not train.completed or train.steps() == 0:
        reason = (
            "the train run did not complete (see run-completes)"
            if not train.completed
            else "the train run made no step"
        )
        missing |= dict.fromkeys(("exact", "reference", "single", "resume", "reshard"), reason)
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
    single = start("single", 1, target.single_args, mode="ddp")
    reference = ended(first)
    by_hand = reference is not None and not reference.completed
    if by_hand:  # graphs that DDP's reducer refuses, such as reentrant checkpointing
        reference = run("reference", target.nproc, mode="ddp", by_hand=True)
    envelope = start("envelope", target.nproc, mode="ddp", nudge=True, by_hand=by_hand)
    evidence = replace(
        evidence,
        exact=ended(twin) if exact else train,
        reference=reference,
        single=ended(single),
        envelope=ended(envelope),
    )
    return _resume(target, runner, evidence, exact, needs)


def simulate(target: Target, runner: Runner) -> Evidence:
    """One process that takes itself for rank 0 of `target.nproc`: structure and traffic without sockets."""
    run = runner.run("simulate", target.nproc, mode="simulate", steps=SIMULATED_STEPS)
    return Evidence(train=run, sources=sources_of(target))


def sources_of(target: Target) -> tuple[Path, ...]:
    """The files of the target's own code."""
    return project_files(target.script, root(target.script, target.module) if target.module else None)


def _resume(target: Target, runner: Runner, evidence: Evidence, exact: bool, needs: Collection[str]) -> Evidence:
    after, missing = evidence.saved_after(), evidence.missing
    if not target.resume_args:
        missing["resume"] = missing["reshard"] = "how this script resumes is not known: give --resume-args"
        return evidence
    if after is None:
        last = target.steps - 1
        reason = f"no save was seen before step {target.steps}: give --save-args that save after one of the steps 1 to {last}"
        missing["resume"] = missing["reshard"] = reason
        return evidence
    if not {"resume", "reshard"} & set(needs):
        return evidence
    runner.keep_checkpoint()
    left = target.steps - after

    def resumed(role: str, world: int, exact: bool) -> Run:
        runner.restore_checkpoint()
        return runner.run(role, world, target.resume_args, steps=left, exact=exact, starting_point="")

    resume = resumed("resume", target.nproc, False) if "resume" in needs else None
    sizes = target.reshard_to if "reshard" in needs else ()
    if not sizes:
        missing["reshard"] = "no other world size was asked for: give --reshard-to"
    continued = resumed("continued", target.nproc, True) if exact and sizes else evidence.train
    reshards = tuple(resumed("reshard", world, exact) for world in sizes)
    return replace(evidence, resume=resume, continued=continued, reshards=reshards)


def _needs_exact(train: Run) -> bool:
    """Whether low-precision compute, autocast or dropout stands between this run and an oracle."""
    low = any(r["param_dtype"] in LOW for r in train.places("shard"))
    return low or any(t.first("inexact") is not None for t in train.traces)


def judge(evidence: Evidence, chosen: Collection[str]) -> list[Finding]:
    """The findings of the chosen rules. What the static tier saw counts where the runs could not decide.

    A rule of the families that only compare (hang, parity) tells a consequence if a rule that names a cause has failed.
    """
    findings = []
    for name in chosen:
        started = time.monotonic()
        rule = RULES[name]
        found = rule.judge(evidence)
        if found.status == "inconclusive" and (hits := evidence.hits.get(name)):
            found = rule.failed(hits[0].told, hits[0].location, tier="static")
        findings.append(replace(found, seconds=time.monotonic() - started))
    causes = any(f.status == "fail" and RULES[f.rule].names_a_cause for f in findings)
    return [
        replace(f, consequence=True) if causes and f.status == "fail" and not RULES[f.rule].names_a_cause else f
        for f in findings
    ]


def select(only: Collection[str], skip: Collection[str], tier: str = "ranks") -> list[str]:
    """The names of the rules to judge; both lists may name rules or families. Raises UserError on an unknown name."""
    families = {rule.family for rule in RULES.values()}
    for name in (*only, *skip):
        if name not in RULES and name not in families:
            raise UserError(f"unknown rule or family '{name}'; `fsdp2 explain` lists them")

    def named(rule: str, names: Collection[str]) -> bool:
        return rule in names or RULES[rule].family in names

    able = [name for name, rule in RULES.items() if tier != "simulate" or rule.simulated]
    return [rule for rule in able if (not only or named(rule, only)) and not named(rule, skip)]


def summary(run: Run) -> dict[str, Any]:
    """What a report says of a run."""
    return {
        "role": run.role,
        "world_size": run.world_size,
        "seconds": round(run.seconds, 3),
        "completed": run.completed,
        "exit": {str(e.rank): e.code for e in run.ended},
        "command": run.command,
        "losses": run.losses,
        "grad_norms": run.grad_norms,
    }


def facts(evidence: Evidence) -> dict[str, Any]:
    """What was seen of the model and its sharding, for the reader of a passing report."""
    run = evidence.train
    if run is None or not run.parameters:
        return {}
    total = sum(e[0]["numel"] for e in run.parameters.values())
    held = [
        sum(e["local_numel"] for es in run.parameters.values() for e in es if e["rank"] == r)
        for r in range(run.world_size)
    ]
    first = next((e[0] for e in run.parameters.values() if e[0]["sharded"]), None)
    return {
        "parameters": len(run.parameters),
        "elements": total,
        "sharded": sum(e[0]["sharded"] for e in run.parameters.values()),
        "groups": sum(len(m["groups"]) for m in run.models),
        "largest_share": max(held) / total if total else 0.0,
        "downhill": run.downhill(),
        "mesh": dict(zip(first["mesh_names"] or range(len(first["mesh"])), first["mesh"], strict=False))
        if first
        else {},
        "saved_after_step": evidence.saved_after(),
        "traffic": traffic(run),
    }

"""The measurements of the runs, as data for a report."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..analysis.comparison import incomparable, loss_apart, norm_apart
from ..analysis.coverage import OnePart, coverage
from ..analysis.limits import limits, nudged
from ..analysis.not_covered import unreached
from ..analysis.reopened_checkpoints import differing, opened
from ..analysis.saves import given, kept
from ..analysis.steps_to_compare import steps_of
from ..analysis.traffic import by_micro_batch, expected, traffic
from ..evidence import LOADS, Evidence, InWindow
from ..trace import Run
from ..trace.events import Checkpoint, Memory
from .redact import stable

Facts = dict[str, Any]


def summary(run: Run, skipped: int = 0) -> Facts:
    """A run in a report; `skipped`: steps that it made before the first that it records."""
    return {
        **_fields(run, "role", "world_size", "completed", "command", "note"),
        "seconds": round(run.seconds, 3),
        "exit": {str(e.rank): e.code for e in sorted(run.ended, key=lambda e: e.rank)},
        "skipped_steps": skipped,
        "losses": run.losses,
        "grad_norms": run.grad_norms,
    }


def facts(evidence: Evidence, work: Path, gpus: bool) -> Facts:
    """The model, its sharding, collectives, memory and checkpoints; {} if no model was called.

    `gpus`: whether ranks computed on GPUs.
    """
    run = evidence.train
    if run is None or not run.parameters:
        return {}
    first = [entries[0] for entries in run.parameters.values()]
    entries = [entry for own in run.parameters.values() for entry in own]
    total = sum(entry.numel for entry in first)
    held = [
        sum(entry.local_numel for entry in entries if entry.rank == rank)
        for rank in range(run.world_size)
    ]
    mesh = next(
        (
            dict(zip(e.mesh_names or range(len(e.mesh)), e.mesh, strict=False))
            for e in first
            if e.sharded
        ),
        {},
    )
    return {
        "parameters": len(first),
        "elements": total,
        "sharded": sum(entry.sharded for entry in first),
        "groups": sum(len(m.groups) for m in run.models),
        "largest_share": max(held) / total if total else 0.0,
        "reduces_loss": run.reduces_loss(),
        "mesh": mesh,
        "saved_after_step": evidence.saved_after(),
        "traffic": traffic(run),
        "expected_traffic": expected(run),
        "traffic_by_micro_batch": by_micro_batch(run),
        "ranks": [trace.rank for trace in run.traces],
        "shards": _shards(run),
        "memory": _memory(run),
        "comparisons": _comparisons(evidence),
        "checkpoints": _checkpoints(evidence, work),
        "returns": _returns(evidence, work),
        **_horizon(evidence),
        **_coverage(evidence, gpus),
    }


def _coverage(evidence: Evidence, gpus: bool) -> Facts:
    """What the runs did; {} where they made no step."""
    found = coverage(evidence, gpus)
    if found is None:
        return {}
    parts = {name: _part(one) for name, one in found.parts.items()}
    return {
        "coverage": {
            "steps": [
                [1, found.last],
                *([w.window.first, w.window.last] for w in found.windows if w.evidence is not None),
            ],
            "windows": [_window(one) for one in found.windows],
            "one_process": found.alone,
            "made": found.made,
            "whole": found.whole,
            "ranks": list(found.ranks),
            "parts": parts,
            "caught": [vars(one) for one in found.caught],
        }
    }


def _window(one: InWindow) -> Facts:
    return {**vars(one.window), "compared": one.evidence is not None, "why": one.why}


def _part(one: OnePart) -> Facts:
    file, line = one.line or (None, None)
    known = {"done": one.done, "there": one.there, "tried": one.tried}
    return {**known, "file": file, "line": line, "option": one.option}


def _horizon(evidence: Evidence) -> Facts:
    """What of the user's code no run reached, or only the survey run, after the compared steps; {}
    where there was no survey.
    """
    survey = evidence.survey
    # ranks that crash do not say which lines they reached
    if survey is None or not (survey.completed or survey.timed_out):
        return {}
    found = [
        {
            "file": one.file,
            "first": one.block.first,
            "last": one.block.last,
            "code": one.code,
            "after_step": one.step,
            **({"side": one.side} if one.side else {}),
        }
        for one in unreached(evidence)
    ]
    of_survey = {"steps": steps_of(survey), "ended": survey.completed, "seconds": survey.timeout}
    return {"horizon": {**of_survey, "lines": found}}


def _shards(run: Run) -> list[Facts]:
    """Each parameter: its placements, and how many elements each rank holds."""
    found = []
    for name, entries in run.parameters.items():
        held = {entry.rank: entry.local_numel for entry in entries}
        known = _fields(entries[0], "shape", "dtype", "trainable", "placements", "group")
        found.append(
            {"name": name, **known, "elements": [held.get(trace.rank) for trace in run.traces]}
        )
    return found


def _memory(run: Run) -> list[Facts]:
    """Bytes on each rank after its last optimizer step."""
    last = [(trace.rank, found[-1]) for trace in run.traces if (found := trace.of(Memory))]
    own, process = ("parameters", "gradients", "optimizer"), ("before", "peak", "cuda")
    return [{"rank": rank, **_fields(r, *own), "process": _fields(r, *process)} for rank, r in last]


def _fields(record: object, *names: str) -> Facts:
    return {name: getattr(record, name) for name in names}


def _comparisons(evidence: Evidence) -> list[Facts]:
    """For each pair of runs that a rule compares step by step: the relative differences, and what
    was allowed.
    """
    exact, after = evidence.full_precision, evidence.saved_after() or 0
    found = []

    def allowed(rule: str) -> dict[str, float]:
        limit = limits(evidence, rule).allowed
        return {"loss": limit["loss"], "grad_norm": limit["gradient norm"]}

    oracles = {
        "ddp": evidence.reference,
        "single-process": evidence.single,
        "original": evidence.original,
    }
    for rule, oracle in ((f"matches-{name}", oracle) for name, oracle in oracles.items()):
        if (
            exact is not None
            and exact.completed
            and oracle is not None
            and not incomparable(exact, oracle, "", "")
        ):
            found.append(_apart(evidence, rule, exact, oracle, 0, allowed(rule)))
    base = nudged(evidence)
    if evidence.perturbed is not None and base is not None:
        found.append(
            _apart(evidence, None, evidence.perturbed, base, 0, {"loss": None, "grad_norm": None})
        )
    if evidence.resume is not None and evidence.train is not None:
        bitwise = {"loss": 0.0, "grad_norm": None}
        found.append(
            _apart(evidence, "resume-is-exact", evidence.resume, evidence.train, after, bitwise)
        )
    if (whole := evidence.resume_full_precision) is not None:
        offset = after if whole is evidence.train else 0
        name = "reshard-keeps-trajectory"
        rest = {**allowed(name), "grad_norm": None}
        found += [_apart(evidence, name, run, whole, offset, rest) for run in evidence.reshards]
    return [comparison for comparison in found if comparison["loss"]]


def _apart(
    evidence: Evidence,
    rule: str | None,
    run: Run,
    oracle: Run,
    after: int,
    allowed: Mapping[str, float | None],
) -> Facts:
    steps = range(1, min(run.steps(), oracle.steps() - after) + 1)
    return {
        "rule": rule,
        "run": evidence.runs.index(run),
        "oracle": evidence.runs.index(oracle),
        "after_step": after,
        "loss": [loss_apart(run, oracle, step, after) for step in steps],
        "grad_norm": [norm_apart(run, oracle, step, after) for step in steps],
        "allowed": dict(allowed),
    }


def _checkpoints(evidence: Evidence, work: Path) -> list[Facts]:
    """What the train run saved, and what another process read from the files."""
    if evidence.train is None:
        return []
    found = {record.path: record for record in opened(evidence)}
    rows = []
    for path, saves in kept(evidence.train).items():
        record, values = found.get(path), given(saves)
        error = record.error if record is not None else None
        state = (
            "not opened" if record is None else "gone" if record.format == "missing" else "opened"
        )
        readable = state == "opened" and not error
        wrong = len(differing(record, values)) if record is not None and readable else 0
        row = {"path": stable(path, work), "after_step": saves[0].after, "op": saves[0].op}
        row |= {"ranks": len({save.rank for save in saves}), "tensors": len(values)}
        row |= {"state": "closed" if error else state, "wrong": wrong}
        rows.append({**row, "error": stable(error, work) if error else None})
    return rows


def _returns(evidence: Evidence, work: Path) -> list[Facts]:
    """Each resumed run, and what it loaded."""
    recovered = [recovery for _, recovery in evidence.crashes]
    rows = []
    for run in (evidence.resume, *evidence.reshards, *recovered, *evidence.damaged):
        if run is not None:
            loads = dict.fromkeys(
                stable(r.to, work) for r in run.places(Checkpoint) if r.op in LOADS and r.to
            )
            rows.append(
                {"run": evidence.runs.index(run), "loads": list(loads), "steps": run.steps()}
            )
    return rows

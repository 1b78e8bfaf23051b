"""The data of a verdict: what was verified, on what, with what runs, findings and facts."""

import platform as machine
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..analysis.capacity import judge
from ..analysis.platform import NOTE
from ..analysis.steps_to_compare import steps_of
from ..evidence import Evidence
from ..finding import Finding
from ..launch import sharing
from ..probe.compat.names import VERSIONS
from ..rules import RULES
from ..source import environment as settings
from ..source.suppress import remarks
from ..trace import Run
from ..trace.events import Adapted, CapacityRecord, Start
from ..verdict import Verdict
from .capacity import outcome
from .facts import facts, summary
from .redact import stable


def assemble(
    target: Mapping[str, Any],
    work: Path,
    evidence: Evidence,
    runs: Sequence[Run],
    findings: Sequence[Finding],
    environment: Mapping[str, object],
) -> Verdict:
    """A verdict before its findings are weighed. `work`: the folder that texts must not name."""
    known = facts(evidence, work, bool(environment.get("devices")))
    if (found := known.get("coverage")) is not None:
        if seen := _observed(evidence, findings):
            found["observed"] = seen
        found["ranks"] = _compared(evidence, findings, found["ranks"])
    return Verdict(
        verdict="inconclusive",
        target=dict(target),
        environment=dict(environment),
        runs=[*map(summary, runs), *_in_windows(evidence)],
        findings=[replace(f, evidence=stable(f.evidence, work)) for f in findings],
        facts=known,
    ).remarked(remarks(evidence.suppressions))


def _in_windows(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """The runs of the windows that were compared."""
    for one in evidence.windows:
        for run in one.evidence.runs if one.evidence is not None else ():
            yield summary(run, one.window.first - 1)


def _observed(evidence: Evidence, findings: Sequence[Finding]) -> int:
    """The steps of the survey run, if a rule judged them."""
    watching = {name for name, rule in RULES.items() if "survey" in rule.reads}
    judged = {f.rule for f in findings if f.status in ("pass", "fail")}
    return steps_of(evidence.survey) if evidence.survey is not None and judged & watching else 0


def _compared(evidence: Evidence, findings: Sequence[Finding], ranks: list[int]) -> list[int]:
    """The numbers of ranks without one process, if its steps could not be compared, and no resume
    on one rank was.
    """
    alone = next((f for f in findings if f.rule == "matches-single-process"), None)
    resumed = any(run.world_size == 1 and run.steps() for run in evidence.reshards)
    if alone is None or alone.status != "inconclusive" or resumed or ranks[0] == 1:
        return ranks
    return [size for size in ranks if size != 1]


def environment_of(
    versions: Mapping[str, Any],
    tier: str,
    backend: str,
    nproc: int,
    launcher: str,
    notes: Sequence[str],
    on_cpu: bool,
) -> dict[str, object]:
    """The environment of the runs.

    `backend`: how ranks share GPUs, "" if they do not; `on_cpu`: CUDA computes on the CPU.
    """
    carried = "fake" if tier == "simulate" else "nccl" if versions["devices"] else "gloo"
    shared = sharing.described(backend, nproc, versions["devices"]) if backend else carried
    known = {key: value for key, value in versions.items() if key != "unused"}
    known |= {
        "platform": machine.platform(),
        "backend": shared,
        "launcher": launcher,
        "notes": list(notes),
    }
    return {**known, "cuda_on_cpu": on_cpu}


def notes(forked: Path | None, evidence: Evidence, files: Sequence[str]) -> list[str]:
    """Notes on how the runs were made.

    `forked`: the script, if its ranks were forked; `files`: notes on files.
    """
    early = settings.note(forked, evidence.sources) if forked is not None else ""
    adapted = evidence.train.places(Adapted) if evidence.train is not None else ()
    libraries = dict.fromkeys(record.text for record in adapted)
    platform = _of_a_capacity_run(evidence) or (NOTE if evidence.cuda_on_cpu else "")
    words = shlex.join(evidence.course.batch or ())
    batch = f"one process was given `{words}`, the batch of all ranks" if words else ""
    torch = next(
        (r.torch for t in (evidence.train.traces if evidence.train else ()) for r in t.of(Start)),
        "",
    )
    tested = torch.partition("+")[0] in ("", *VERSIONS)
    unknown = "" if tested else f"torch {torch}: fsdp2 was run on {', '.join(VERSIONS)}"
    return [
        note
        for note in (unknown, platform, batch, early, *libraries, evidence.course.stale, *files)
        if note
    ]


def _of_a_capacity_run(evidence: Evidence) -> str:
    """What a rank needs, where the script ran on tensors without memory."""
    run = evidence.train
    if run is None or not run.all(CapacityRecord):
        return ""
    return (
        f"at full size, on CUDA tensors without memory: {outcome(judge(run, None))}. `fsdp2 plan`"
        " shows where"
    )

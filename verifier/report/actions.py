"""What to do after a verdict, in order, and what even a pass has not looked at: for a reader that
acts on the JSON report.
"""

from typing import Any

from ..analysis.wording import count, some
from ..finding import Finding
from ..verdict import Verdict
from . import proved
from .text import inconclusive, place, stopped_early

MOST = 12  # reasons for which something is inconclusive, and rules named with one


def next_steps(verdict: Verdict) -> list[dict[str, str]]:
    """Edits first, then the run that shows whether they are right, then what can be judged with
    other options, then what stays unproved.

    `do`: "edit" (`at` a line), "find" (no line is known), "report a fault of fsdp2", "run" or
    "report as not checked".
    """
    wrong = [
        f
        for f in verdict.findings
        if f.status in ("fail", "error") and not f.consequence and not f.warns
    ]
    steps = [_after(finding) for finding in wrong if not verdict.stands(finding)]
    if steps and verdict.target.get("command"):
        steps.append({"do": "run", "text": str(verdict.target["command"])})
    if verdict.suggestion:
        steps.append({"do": "run", "text": verdict.suggestion})
    reasons = list(inconclusive(verdict.findings).items())
    if stopped := stopped_early(verdict):
        reasons = [(stopped, [rule for _, rules in reasons for rule in rules])]
    steps += [
        {"do": "report as not checked", "rule": some(rules, MOST), "text": reason}
        for reason, rules in reasons[:MOST]
    ]
    return steps


def _after(finding: Finding) -> dict[str, str]:
    if finding.status == "error":
        return {"do": "report a fault of fsdp2", "rule": finding.rule, "text": finding.evidence}
    if finding.location is None or not finding.location.file:
        return {
            "do": "find",
            "rule": finding.rule,
            "text": f"{finding.evidence}. {finding.fix or ''}".strip(),
        }
    return {
        "do": "edit",
        "rule": finding.rule,
        "at": place(finding.location),
        "text": finding.fix or finding.evidence,
    }


def not_covered(verdict: Verdict) -> list[str]:
    """What the runs have not looked at, what matters most first."""
    if verdict.tier != "ranks":
        return []
    found = proved.not_covered(verdict)
    skipped = [str(item["rule"]) for item in verdict.skipped]
    found += [f"skipped: {', '.join(skipped)}"] if skipped else []
    target: dict[str, Any] = dict(verdict.target)
    found.append("other arguments")
    sizes = sorted({1, int(target.get("nproc") or 1), *map(int, target.get("reshard_to") or ())})
    found.append(
        f"other world sizes than {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
        if len(sizes) > 1
        else "more than one rank"
    )
    if not verdict.environment.get("devices"):
        found.append("NCCL, CUDA kernels and memory: the ranks computed on the CPU")
    low = any(run["role"] == "full_precision" for run in verdict.runs)
    found += (
        ["the numbers of low precision and dropout, which the comparisons leave out"] if low else []
    )
    absent = count(verdict.counts.get("not_applicable", 0), "rule")
    return [*found, f"{absent} about what the script does not have (not_applicable)"]

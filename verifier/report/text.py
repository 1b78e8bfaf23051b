"""The report for a reader with little patience: what is wrong first, where, why, the smallest fix, the command that proves it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..config.policy import open_but_allowed
from ..finding import Finding
from ..trace.events import Place
from ..verdict import Comparison, Verdict
from .sanitize import sanitize
from .tiers import not_followed, verdict_line

WIDTH = 118
SHORT = 100  # of a pass; the JSON report has all
LIMIT = 9_000  # characters; what agents read of one command's output

DAMAGE = ("provoked", "repeat", "crash", "recovered", "damaged")


def render(verdict: Verdict) -> str:
    """The whole report as plain text of at most about 10,000 characters, the verdict last."""
    lines = [
        *_named(verdict),
        *failures(verdict),
        *_open(verdict),
        *not_followed(verdict),
        *_passes(verdict),
        *_skipped(verdict),
        *_losses(verdict),
        *_facts(verdict),
    ]
    for told in verdict.environment.get("notes", ()):
        lines += ["", *_wrapped("", told, first="note ")]
    text = "\n".join(lines)
    if len(text) > LIMIT:
        text = text[:LIMIT].rpartition("\n")[0] + "\n... (cut; --report json=PATH has all)"
    return sanitize(f"{text}\n{_last(verdict)}\n")


def _named(verdict: Verdict) -> Iterator[str]:
    """Which of several targets this is, and whether it is only a part of what was asked for."""
    if verdict.partial:
        yield from _wrapped("", verdict.partial, first="")
        yield ""
    if verdict.target.get("name"):
        yield f"target {verdict.target['name']}"
        yield ""


def failures(verdict: Verdict) -> Iterator[str]:
    """What is wrong, each cause with its line, its fix and its page; what a baseline knows comes last."""
    failed = sorted((f for f in verdict.findings if f.status in ("fail", "error")), key=verdict.stands)
    for finding in (f for f in failed if not f.consequence):
        yield from failure(finding, "KNOWN" if verdict.stands(finding) else "FAIL")
        yield ""
    followers = [f for f in failed if f.consequence]
    if followers:
        yield f"     and as a consequence: {', '.join(f.rule for f in followers)}"
        for follower in followers:
            yield f"       {textwrap.shorten(f'{follower.rule}: {follower.evidence}', WIDTH - 7, placeholder=' ...')}"
    if failed and verdict.target.get("command"):
        yield f"     after the fix, prove it: {verdict.target['command']}"
    if failed:
        yield ""


def failure(finding: Finding, word: str = "FAIL") -> Iterator[str]:
    """One finding with its line, its fix and its page."""
    yield f"{word} {finding.rule}" + (f" [{finding.tier}]" if finding.tier != "ranks" else "")
    yield from _wrapped("", finding.evidence)
    if finding.location:
        yield f"     at   {place(finding.location)}"
        if finding.location.code:
            yield f"              {finding.location.code}"
    if finding.fix:
        yield from _wrapped("fix ", finding.fix)
    yield f"     page fsdp2 explain {finding.rule}"


def compared(held: Comparison, answer: str) -> str:
    """One line on what is new, what stands and what has gone."""

    def told(number: int, thing: str, findings: Sequence[Finding]) -> str:
        return f"{number} {thing}" + (f" ({', '.join(dict.fromkeys(f.rule for f in findings))})" if findings else "")

    parts = [told(len(held.new), "new", held.new)]
    if held.standing:
        parts.append(told(len(held.standing), "KNOWN AND NOT FIXED", held.standing))
    parts.append(told(len(held.gone), "gone", held.gone))
    if held.unjudged:
        parts.append(told(len(held.unjudged), "not judged again", held.unjudged))
    return f"against {held.path}: {answer}; failures: {', '.join(parts)}"


def _open(verdict: Verdict) -> Iterator[str]:
    """Inconclusive rules, those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for finding in verdict.findings:
        if finding.status == "inconclusive":
            reasons.setdefault(finding.evidence, []).append(finding.rule)
    for reason, rules in reasons.items():
        yield from _wrapped("", ", ".join(rules), first="open ")
        yield from _wrapped("", f"not checked: {reason}")
    if reasons:
        yield ""


def _passes(verdict: Verdict) -> Iterator[str]:
    """One line a rule; those that say the same thing share one. Rules that do not apply come last."""
    words = {"pass": "pass ", "not_applicable": "n/a  "}
    told: dict[tuple[str, str], list[str]] = {}
    for finding in sorted(verdict.findings, key=lambda f: f.status == "not_applicable"):
        if finding.status in words:
            margin = f" [margin {finding.margin:.0f}x]" if finding.margin and finding.margin > 1 else ""
            told.setdefault((words[finding.status], finding.evidence + margin), []).append(finding.rule)
    for (word, evidence), (first, *others) in told.items():
        if others:
            yield from _wrapped("", f"{', '.join([first, *others])}: {evidence}", first=word)
        else:
            yield f"{word}{first:<36}{textwrap.shorten(evidence, SHORT, placeholder=' ...')}"


def why_skipped(skip: Mapping[str, Any]) -> str:
    """The reason of one item of `Verdict.skipped`, and its last day."""
    until = f" (until {skip['until']})" if skip["until"] else ""
    return f"skipped: {skip['reason']}{until}"


def _skipped(verdict: Verdict) -> Iterator[str]:
    """Rules that were left out, those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for skip in verdict.skipped:
        reasons.setdefault(why_skipped(skip), []).append(skip["rule"])
    for reason, rules in reasons.items():
        yield from _wrapped("", ", ".join(rules), first="skip ")
        yield from _wrapped("", reason)


def _losses(verdict: Verdict) -> Iterator[str]:
    """The loss of each step in each run, side by side; resumed runs begin where they were resumed."""
    rows = [
        run for run in verdict.runs if any(loss is not None for loss in run["losses"]) and run["role"] not in DAMAGE
    ]
    if not rows:
        return
    steps = max(len(run["losses"]) for run in rows)
    after = verdict.facts.get("saved_after_step") or 0
    yield ""
    yield "loss of step          " + "".join(f"{step:>12}" for step in range(1, steps + 1))
    for run in rows:
        skipped = after if run["role"] in ("resume", "resume_full_precision", "reshard") else 0
        cells = [" " * 12] * skipped + [_loss(value) for value in run["losses"]]
        yield f"  {run['role']:<10} {run['world_size']:>2} rank{'s' if run['world_size'] > 1 else ' '}  " + "".join(
            cells
        )


def _facts(verdict: Verdict) -> Iterator[str]:
    facts = verdict.facts
    if "mesh" in facts:
        mesh = " x ".join(
            f"{name}={size}" if not str(name).isdigit() else str(size) for name, size in facts["mesh"].items()
        )
        yield ""
        yield (
            f"{facts['sharded']} of {facts['parameters']} parameters sharded over a mesh of {mesh or 'no ranks'} "
            f"in {facts['groups']} groups; at most {facts['largest_share']:.1%} of {facts['elements']:,} elements on one rank; "
            f"updates {'go' if facts['downhill'] else 'do not go'} downhill"
        )
        yield from _traffic(facts["traffic"], facts["groups"])


def _traffic(traffic: dict[str, float], groups: int) -> Iterator[str]:
    """The collectives of one step, those of forward and backward apart from those that the script itself calls."""
    if not traffic:
        return
    told = []
    for where, whose in (("model", "forward and backward"), ("script", "the rest of the step")):
        kinds = [key.removesuffix(f"_{where}") for key in traffic if key.endswith(f"_{where}")]
        counts = [
            f"{traffic[f'{kind}_{where}']:.0f} {kind} ({traffic[f'{kind}_{where}_bytes']:,.0f} bytes)" for kind in kinds
        ]
        told.append(f"{whose}: {', '.join(counts) or 'none'}")
    yield f"collectives of a step, {groups} groups, {traffic['fsdp_forwards']:.0f} FSDP forwards: {'; '.join(told)}"


def _last(verdict: Verdict) -> str:
    told = (
        ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in verdict.counts.items()) or "no findings"
    )
    environment = verdict.environment
    allowed = open_but_allowed(verdict.findings)
    loud = f"NOT CHECKED, and not required: {', '.join(allowed)}\n" if allowed else ""
    return (
        f"torch {environment.get('torch')}, Python {environment.get('python')}, "
        f"{len(verdict.runs)} runs in {verdict.seconds:.0f} s; rules: {told}\n{loud}{_partial(verdict)}"
        f"{verdict_line(verdict)}" + (f"\n{compared(verdict.baseline, verdict.answer)}" if verdict.baseline else "")
    )


def _partial(verdict: Verdict) -> str:
    return "".join(f"{line}\n" for line in _wrapped("", verdict.partial, first="")) if verdict.partial else ""


def place(location: Place) -> str:
    """`path:line in function`, the path relative to where the reader is if that is shorter."""
    path = location.file
    relative = os.path.relpath(path)
    return f"{min(path, relative, key=len)}:{location.line} in {location.function}"


def _loss(value: float | None) -> str:
    return f"{'-':>12}" if value is None else f"{value:>12.7g}"


def _wrapped(label: str, text: str, first: str = "     ") -> list[str]:
    further = "     " + " " * len(label)
    return textwrap.wrap(text, WIDTH, initial_indent=first + label, subsequent_indent=further, break_on_hyphens=False)

"""The report for a terminal or a log: what failed, where, why and the fix; what could not be
checked; one line of counts; the verdict.

With `verbose` also what passed, what is not applicable or skipped, the losses, the sharding and the
collectives.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from ..analysis.wording import count, cut
from ..config.commands import explain
from ..config.policy import open_but_allowed
from ..finding import Finding
from ..trace.events import Line
from ..verdict import Comparison, Verdict
from .limits_text import MOST, counted, not_followed, verdict_line
from .locations import shortest, steps_to
from .numbers_text import counts, facts, losses
from .proved import branches_named, headline
from .sanitize import sanitize, shown
from .wrapping import width, wrapped

LIMIT = 9_000  # characters; what agents read of one command's output
INDENT = "     "
REASONS, RULES_OF_ONE = 8, 10  # how many reasons, and rules with one reason, are listed without -v


def render(verdict: Verdict, verbose: bool = False) -> str:
    """The report as plain text of at most about 10,000 characters, the verdict last."""
    lines = [
        *_named(verdict),
        *_headline(verdict),
        *_horizon(verdict, verbose),
        *failures(verdict),
        *_inconclusive(verdict, verbose),
    ]
    lines += not_followed(verdict, verbose)
    if verbose:
        lines += [
            *_passes(verdict),
            *_judged(verdict),
            *_skipped(verdict),
            *losses(verdict),
            *facts(verdict),
        ]
    for note in verdict.environment.get("notes", ()):
        lines += filled(note, "note ")
    return sanitize("\n".join([*bounded(lines), *_last(verdict, verbose)]) + "\n")


def render_lint(verdict: Verdict, verbose: bool = False) -> str:
    """The report of `fsdp2 lint`: the findings, the calls that were not followed, and one line that
    counts.
    """
    lines = bounded(
        [
            *failures(verdict),
            *not_followed(verdict, verbose),
            *(_judged(verdict) if verbose else ()),
        ]
    )
    for one in verdict.remarks:
        lines += filled(one.text, "note ")
    lines += filled(lint_line(verdict))
    lines += compared(verdict)
    return sanitize("\n".join(lines) + "\n")


def lint_line(verdict: Verdict) -> str:
    """How many findings `fsdp2 lint` has, in how much of the sources."""
    found = count(len(verdict.findings), "finding") if verdict.findings else "no findings"
    said = verdict.partial or f"{found} in {counted(verdict.facts['sources'])}"
    return f"{said} ({verdict.seconds * 1000:.0f} ms; nothing was run)"


def bounded(lines: Iterable[str]) -> list[str]:
    """The first LIMIT characters, in whole lines."""
    text = "\n".join(lines)
    if len(text) <= LIMIT:
        return text.split("\n") if text else []
    return [*text[:LIMIT].split("\n")[:-1], "... (cut; --report json=PATH has all)"]


def by_reason(items: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """{reason: rules} of (rule, reason) pairs, in their order."""
    reasons: dict[str, list[str]] = {}
    for rule, reason in items:
        reasons.setdefault(reason, []).append(rule)
    return reasons


def inconclusive(findings: Iterable[Finding]) -> dict[str, list[str]]:
    """{reason: the rules that are inconclusive for it}."""
    return by_reason((f.rule, f.evidence) for f in findings if f.status == "inconclusive")


def _named(verdict: Verdict) -> Iterator[str]:
    """Which of several targets this is, and whether it is only a part of what was asked for."""
    for text in (
        verdict.partial,
        f"target {verdict.target['name']}" if verdict.target.get("name") else "",
    ):
        if text:
            yield from (*filled(text), "")


def _headline(verdict: Verdict) -> Iterator[str]:
    """What the verdict proved and what it left out."""
    lines = headline(verdict)
    for line in lines:
        yield from filled(line, further=INDENT)
    if lines:
        yield ""


def _horizon(verdict: Verdict, verbose: bool) -> Iterator[str]:
    """What of the user's training code was not judged, but for what the second line names; MOST of
    each kind, all of them with `verbose`.
    """
    named = () if verbose else branches_named(verdict)
    found = judged_or_not(verdict.facts, named)
    for word, places in found:
        kept = places if verbose else places[:MOST]
        more = [f"{len(places) - len(kept)} more (-v)"] if len(places) > len(kept) else []
        yield from filled("; ".join([*kept, *more]), f"{word}: ", INDENT)
    if found:
        yield ""


# What a fault leaves a rule without, in the words of its reason.
_WITHOUT = re.compile(r"\b(stopped|did not complete|does not resume|are not finite)\b")
SUGGESTED = "the script's options look as if this judged its checkpoints, too (not run):"


def judged_or_not(
    found: Mapping[str, Any], named: Collection[Mapping[str, Any]] = ()
) -> list[tuple[str, list[str]]]:
    """(heading, entries) of the steps behind the first ones that were compared or left out, of what
    no run reached, and of what only the survey run did, after the compared steps; without the
    branches that are `named` elsewhere.

    `found`: the facts of a verdict.
    """
    steps = [(one, _steps(one)) for one in found.get("coverage", {}).get("windows", ())]
    parts = [
        ("ALSO COMPARED", [text for one, text in steps if one["compared"]]),
        ("NOT COMPARED", [text for one, text in steps if not one["compared"]]),
    ]
    caught = [
        f"step {one['step']}: {one['text']}" for one in found.get("coverage", {}).get("caught", ())
    ]
    parts.append(("CAUGHT, AND TRAINED ON", caught))
    horizon = found.get("horizon")
    if horizon is not None:
        stopped = (
            f" (the script was stopped after {count(horizon['steps'], 'step')},"
            f" {horizon['seconds']:.0f} s)"
        )
        rest = [one for one in horizon["lines"] if one not in named]
        never = [_lines(one) for one in rest if one["after_step"] is None]
        known = [one for one in rest if one["after_step"] is not None]
        later = [f"{_lines(one)} after step {one['after_step']}" for one in known]
        parts.append(("NOT RUN" + ("" if horizon["ended"] else stopped), never))
        parts.append(("RUN ONCE, NOT COMPARED", later))
    return [(word, entries) for word, entries in parts if entries]


def _steps(one: Mapping[str, Any]) -> str:
    """`steps 39-40 (the last steps)`."""
    steps = f"steps {one['first']}-{one['last']}"
    if one["first"] == one["last"]:
        steps = f"step {one['first']}"
    return f"{steps} ({one['reason']}" + (f"; {one['why']})" if one["why"] else ")")


def _lines(one: Mapping[str, Any]) -> str:
    """`train.py:88-95 (if step % 500 == 0:)`."""
    file = shortest(one["file"])
    last = f"-{one['last']}" if one["last"] > one["first"] else ""
    return f"{file}:{one['first']}{last} ({one.get('side') or one['code'][:60]})"


def failures(verdict: Verdict) -> Iterator[str]:
    """Each failure or error with its line, fix and docs, then their consequences; failures that the
    baseline has come last.
    """
    failed = verdict.failures
    for finding in (f for f in failed if not f.consequence):
        yield from failure(finding, kind(finding, verdict))
        yield ""
    if followers := [f for f in failed if f.consequence]:
        yield f"{INDENT}as a consequence:"
        for follower in followers:
            yield shortened(f"{follower.rule}: {follower.evidence}", INDENT + "  ")
        yield f"{INDENT}  (each whole: fsdp2 explain RULE --report REPORT.json)"
    if failed and verdict.target.get("command"):
        yield f"{INDENT}re-run after fixing: {verdict.target['command']}"
    if followers or (failed and verdict.target.get("command")):
        yield ""


def kind(finding: Finding, verdict: Verdict) -> str:
    """What a finding is, in one word of a log."""
    if verdict.stands(finding):
        return "KNOWN"
    if finding.warns:
        return "WARNING"
    return {"error": "ERROR", "fail": "FAIL"}.get(finding.status, "NOT CHECKED")


def failure(finding: Finding, word: str = "FAIL") -> Iterator[str]:
    """One finding with its line, fix and docs."""
    yield f"{word} {finding.rule}" + (f" [{finding.tier}]" if finding.tier != "ranks" else "")
    yield from filled(finding.evidence, INDENT)
    for step, location in steps_to(finding.location):
        yield f"{INDENT}{step:4} {place(location)}"
        if location.code:
            yield shortened(location.code, " " * 14)
    if finding.fix:
        yield from filled(finding.fix, f"{INDENT}fix  ")
    yield f"{INDENT}docs {explain(finding.rule)}"


def compared(verdict: Verdict) -> list[str]:
    """`comparison` on the lines of a terminal; none without a baseline."""
    return (
        filled(comparison(verdict.baseline, verdict.answer)) if verdict.baseline is not None else []
    )


def comparison(held: Comparison, answer: str) -> str:
    """How many failures are new, known from the baseline, and gone."""
    groups = {
        "new": held.new,
        "known (in baseline)": held.standing,
        "gone": held.gone,
        "not judged": held.unjudged,
    }
    parts = []
    for what, findings in groups.items():
        rules = f" ({', '.join(dict.fromkeys(f.rule for f in findings))})" if findings else ""
        parts += [f"{len(findings)} {what}{rules}"] if findings or what in ("new", "gone") else []
    return f"against {held.path}: {answer}; failures: {', '.join(parts)}"


def _inconclusive(verdict: Verdict, verbose: bool) -> Iterator[str]:
    """Inconclusive rules, those with one reason together; without `verbose` the first of them, and
    one line for a run without a step, and for those that a fault left without what they judge.
    """
    reasons = inconclusive(verdict.findings)
    stopped = stopped_early(verdict)
    why = stopped or "what failed may be why; run again when it is repaired"
    failed = {f.rule for f in verdict.failures if not f.warns}
    lacking = [reason for reason in reasons if stopped or _by_a_fault(reason, failed)]
    rules = sum(len(reasons[reason]) for reason in lacking)
    if rules and not verbose:
        yield from (*filled(f"NOT CHECKED {count(rules, 'rule')}: {why} (-v lists them)"), "")
        reasons = {why: own for why, own in reasons.items() if why not in lacking}
    yield from _reasons(reasons, verbose)
    if verdict.suggestion:
        yield from filled(SUGGESTED)
        yield from (f"{INDENT}{shown(verdict.suggestion)}", "")


def _by_a_fault(reason: str, failed: Collection[str]) -> bool:
    """Whether a rule could not be judged since a run stopped or made no finite numbers, or one of
    the failed rules is named.
    """
    named = any(re.search(rf"(?<![\w-]){rule}(?![\w-])", reason) for rule in failed)
    return bool(failed) and (named or bool(_WITHOUT.search(reason)))


def _reasons(reasons: Mapping[str, list[str]], verbose: bool) -> Iterator[str]:
    """Each reason with its rules; without `verbose` the first REASONS of them."""
    shown_reasons = list(reasons.items())[: None if verbose else REASONS]
    for reason, own in shown_reasons:
        kept = own if verbose else own[:RULES_OF_ONE]
        more = [f"{len(own) - len(kept)} more (-v)"] if len(own) > len(kept) else []
        yield from filled(", ".join([*kept, *more]), "NOT CHECKED ", INDENT)
        yield from filled(reason, INDENT)
    left = sum(map(len, reasons.values())) - sum(len(own) for _, own in shown_reasons)
    if left:
        yield from filled(
            f"NOT CHECKED {count(left, 'more rule')} for other reasons (-v lists them)"
        )
    if reasons:
        yield ""


def stopped_early(verdict: Verdict) -> str:
    """Why nothing could be compared, if `run-completes` did not pass since the train run made no
    step; else "".
    """
    train = [run for run in verdict.runs if run["role"] == "train"]
    ended = next(
        (
            f
            for f in verdict.findings
            if f.rule == "run-completes" and f.status in ("fail", "inconclusive")
        ),
        None,
    )
    if ended is None or not train or train[0]["completed"] or train[0]["losses"]:
        return ""
    return "the script stopped before its first step" if ended.status == "fail" else ended.evidence


def _passes(verdict: Verdict) -> Iterator[str]:
    """What passed, what no run did, then what is not applicable; rules with the same evidence share
    a line.
    """
    words = (("pass", "pass "), ("not_covered", "not covered "), ("not_applicable", "n/a  "))
    for status, word in words:
        found = [f for f in verdict.findings if f.status == status]
        margins = {
            f.rule: f" [margin {f.margin:.0f}x]" for f in found if f.margin and f.margin >= 2
        }
        for evidence, rules in by_reason(
            (f.rule, f.evidence + margins.get(f.rule, "")) for f in found
        ).items():
            yield from filled(f"{', '.join(rules)}: {evidence}", word)


def _judged(verdict: Verdict) -> Iterator[str]:
    """The rules that the static tier judged without a finding."""
    found = {f.rule for f in verdict.findings}
    if rules := [
        rule for rule in verdict.facts.get("sources", {"rules": ()})["rules"] if rule not in found
    ]:
        yield from filled(f"{', '.join(rules)}: no findings", "read ")


def why_skipped(skip: Mapping[str, Any]) -> str:
    """The reason of one item of `Verdict.skipped`, and its last day."""
    until = f" (until {skip['until']})" if skip["until"] else ""
    return f"skipped: {skip['reason']}{until}"


def _skipped(verdict: Verdict) -> Iterator[str]:
    """Rules that were left out, those with one reason together."""
    for reason, rules in by_reason(
        (skip["rule"], why_skipped(skip)) for skip in verdict.skipped
    ).items():
        yield from (*filled(", ".join(rules), "skip "), *filled(reason, INDENT))


def _last(verdict: Verdict, verbose: bool) -> Iterator[str]:
    """The counts, what was not checked and need not be, the verdict and its comparison with the
    baseline.
    """
    environment = verdict.environment
    if verbose:
        yield (
            f"torch {environment.get('torch')}, Python {environment.get('python')},"
            f" {environment.get('platform')}"
        )
        kept = {
            "isolation": environment.get("isolation"),
            "temporary files": environment.get("temporary_folder"),
        }
        yield from filled(
            "; ".join(f"{name}: {value}" for name, value in kept.items() if value) or "no isolation"
        )
    yield from filled(counts(verdict) + ("" if verbose else "; -v lists them, with reasons"))
    if allowed := open_but_allowed(verdict.findings):
        yield from filled(f"NOT CHECKED, and not required: {', '.join(allowed)}")
    if verdict.partial:
        yield from filled(verdict.partial)
    yield from filled(verdict_line(verdict))
    yield from compared(verdict)


def place(location: Line) -> str:
    """`path:line in function`, the path relative to the current folder if that is shorter."""
    return f"{shortest(location.file)}:{location.line} in {location.function}"


def filled(written: str, first: str = "", further: str | None = None) -> list[str]:
    """Wrapped after what does not print was replaced by an escape, which is longer."""
    return wrapped(shown(written), first, further)


def shortened(written: str, first: str) -> str:
    """One line no wider than the terminal, cut between words if the last one is not long."""
    return first + cut(shown(written, ""), width() - len(first))

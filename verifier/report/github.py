"""The report for GitHub Actions: workflow commands that annotate the lines of a pull request, the text report, and a step summary.

GitHub shows 10 errors and 10 warnings of a step and 50 annotations of a job, so there are at most 10 here; the summary has all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..finding import Finding
from ..verdict import Verdict
from . import lint_text, text
from .places import place_of, relative, where
from .sanitize import sanitize, shown
from .tiers import limits, number

MOST = 10
LONGEST = 2_000  # characters of one message
SUMMARY = 1024 * 1024 - 4096  # bytes; GitHub drops a summary of more than 1024 KiB whole
_ORDER = ("error", "warning", "notice")


def render(verdict: Verdict) -> str:
    """The annotations, the worst first, then the text report, in which nothing is a command."""
    told = commands(verdict)
    lines = told[:MOST]
    if len(told) > MOST:
        lines.append(f"{len(told) - MOST} more findings are in the report below and in the summary of this step")
    plain = lint_text if verdict.linted else text
    return "\n".join([*lines, plain.render(verdict)])


def commands(verdict: Verdict) -> list[str]:
    """A workflow command for each failure, and one for all rules that are open for one reason; a notice for what does not fail the gate."""
    found = [
        (_level(f, verdict), f, f.rule, _told(f, verdict)) for f in verdict.findings if f.status in ("fail", "error")
    ]
    open_for: dict[tuple[str, bool], list[Finding]] = {}
    for finding in verdict.findings:
        if finding.status == "inconclusive":
            open_for.setdefault((finding.evidence, finding.required), []).append(finding)
    for (reason, required), findings in open_for.items():
        rules = ", ".join(f.rule for f in findings)
        title = rules if len(findings) == 1 else f"{len(findings)} rules could not be checked"
        level = "warning" if required else "notice"
        found.append((level, findings[0], title, f"not checked: {reason}\n{rules}"))
    if verdict.partial:
        whole = Finding("", "error", verdict.partial)
        found.insert(0, ("error", whole, "not a whole verification", verdict.partial))
    found.sort(key=lambda item: _ORDER.index(item[0]))
    return [_command(level, finding, verdict, title, message) for level, finding, title, message in found]


def _level(finding: Finding, verdict: Verdict) -> str:
    if verdict.stands(finding):
        return "notice"
    return "warning" if finding.consequence else "error"


def _told(finding: Finding, verdict: Verdict) -> str:
    lines = [finding.evidence]
    if verdict.baseline is not None and verdict.stands(finding):
        lines.insert(0, f"Known and not fixed: it stands in {verdict.baseline.path}.")
    if finding.fix:
        lines.append(f"Fix: {finding.fix}")
    return "\n".join([*lines, f"fsdp2 explain {finding.rule}"])


def _command(level: str, finding: Finding, verdict: Verdict, title: str, message: str) -> str:
    location = place_of(finding, verdict)
    file = relative(location.file)
    properties = {"title": f"fsdp2: {title}"}
    if file is not None:
        properties = {"file": file, "line": str(location.line), **properties}
    told = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
    return f"::{level} {told}::{_escaped(message[:LONGEST])}"


def _escaped(value: str, further: str = "") -> str:
    """As the runner undoes it: `%`, carriage return and newline, in properties also `:` and `,`; no other control character."""
    return "".join(f"%{ord(c):02X}" if c in "%\r\n" + further else c for c in shown(value, "\r\n\t"))


def summary(verdict: Verdict, room: int = SUMMARY) -> str:
    """The report as Markdown of at most `room` bytes. What comes from the script stands in code blocks, where nothing is markup."""
    marks = {
        "pass": "Passed",
        "fail": "Failed",
        "inconclusive": "Not all could be checked",
        "error": "An error of fsdp2",
        "no_findings": "No findings in the sources",
    }
    head = f"## fsdp2: {marks[verdict.answer]}\n\n"
    command = verdict.target.get("command")
    head += _block(command) if command else ""
    head += _block(verdict.partial) if verdict.partial else ""
    head += _block(limits(verdict)) if limits(verdict) else ""
    head += _block(text.compared(verdict.baseline, verdict.answer)) if verdict.baseline is not None else ""
    cut = "\nThe rest was cut to fit into the summary: `--report json=PATH` has all.\n"
    left = room - len(cut)
    out, used = "", 0
    if left < 0:
        return ""
    for part in (head, *_parts(verdict)):
        size = len(part.encode("utf-8", "backslashreplace"))
        if used + size > left:
            return out + cut
        out, used = out + part, used + size
    return out


def _parts(verdict: Verdict) -> Iterator[str]:
    failed = sorted((f for f in verdict.findings if f.status in ("fail", "error")), key=verdict.stands)
    for finding in failed:
        word = (
            "known and not fixed" if verdict.stands(finding) else "a consequence" if finding.consequence else "failed"
        )
        told = [finding.evidence]
        if finding.location:
            told += [f"at {where(finding.location)}", f"    {finding.location.code}"]
        told += [f"fix: {finding.fix}"] if finding.fix else []
        yield f"### `{finding.rule}` {word}\n\n" + _block("\n".join([*told, f"fsdp2 explain {finding.rule}"]))
    reasons: dict[str, list[str]] = {}
    for finding in verdict.findings:
        if finding.status == "inconclusive":
            reasons.setdefault(finding.evidence, []).append(finding.rule)
    for reason, rules in reasons.items():
        yield f"### Not checked: {', '.join(f'`{rule}`' for rule in rules)}\n\n" + _block(reason)
    if verdict.skipped:
        yield "### Not judged\n\n" + _block(
            "\n".join(f"{item['rule']}: {text.why_skipped(item)}" for item in verdict.skipped)
        )
    for status, what in (("pass", "passed"), ("not_applicable", "not applicable")):
        if found := [f for f in verdict.findings if f.status == status]:
            yield f"<details><summary>{number(len(found), 'rule')} {what}</summary>\n\n"
            yield _block("\n".join(f"{f.rule}: {f.evidence}" for f in found))
            yield "</details>\n\n"


def _block(content: str) -> str:
    """A code block that its content cannot end."""
    content = sanitize(content)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", content)), default=0))
    return f"{fence}text\n{content}\n{fence}\n\n"

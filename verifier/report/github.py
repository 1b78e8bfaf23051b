"""The report for GitHub Actions: workflow commands that annotate the lines of a pull request, the
text report, and a step summary.

GitHub shows 10 errors and 10 warnings of a step and 50 annotations of a job, so there are at most
10 here; the summary has all.
"""

import re
from collections.abc import Iterator

from ..analysis.wording import count
from ..config.commands import explain
from ..finding import Finding
from ..verdict import Verdict
from . import text
from .limits_text import limits
from .locations import lines_of, place_of, relative
from .proved import branches_named, headline
from .sanitize import sanitize, shown

MOST = 10
LONGEST = 2_000  # characters of one message
SUMMARY = 1024 * 1024 - 4096  # bytes; GitHub drops a summary of more than 1024 KiB whole
_ORDER = ("error", "warning", "notice")


def render(verdict: Verdict) -> str:
    """The annotations, the worst first, then the text report, in which nothing is a command."""
    found = commands(verdict)
    lines = found[:MOST]
    if len(found) > MOST:
        lines.append(
            f"{len(found) - MOST} more findings are in the report below and in the summary of this"
            " step"
        )
    plain = text.render_lint(verdict) if verdict.linted else text.render(verdict)
    return "\n".join([*lines, plain])


def commands(verdict: Verdict) -> list[str]:
    """A workflow command for each failure and for each reason of inconclusive rules; a notice for
    what does not fail the gate.
    """
    failed = (f for f in verdict.findings if f.status in ("fail", "error"))
    found = [(_level(f, verdict), f, f.rule, _message(f, verdict)) for f in failed]
    unchecked: dict[tuple[str, bool], list[Finding]] = {}
    for finding in verdict.findings:
        if finding.status == "inconclusive":
            unchecked.setdefault((finding.evidence, finding.required), []).append(finding)
    for (reason, required), findings in unchecked.items():
        rules = ", ".join(f.rule for f in findings)
        title = rules if len(findings) == 1 else f"{len(findings)} rules could not be checked"
        found.append(
            (
                "warning" if required else "notice",
                findings[0],
                title,
                f"not checked: {reason}\n{rules}",
            )
        )
    if verdict.partial:
        whole = Finding("", "error", verdict.partial)
        found.insert(0, ("error", whole, "incomplete verification", verdict.partial))
    for one in verdict.remarks:
        where = Finding("", "error", one.text, location=one.location)
        found.append(("warning", where, "policy", one.text))
    if lines := headline(verdict):
        whole = Finding("", "pass", "")
        found.insert(0, ("notice", whole, lines[0], "\n".join(lines)))
    found.sort(key=lambda item: _ORDER.index(item[0]))
    return [
        _command(level, finding, verdict, title, message)
        for level, finding, title, message in found
    ]


def _level(finding: Finding, verdict: Verdict) -> str:
    if verdict.stands(finding):
        return "notice"
    return "warning" if finding.consequence or finding.warns else "error"


def _message(finding: Finding, verdict: Verdict) -> str:
    lines = [finding.evidence]
    if verdict.baseline is not None and verdict.stands(finding):
        lines.insert(0, f"Known (in baseline {verdict.baseline.path}).")
    if finding.fix:
        lines.append(f"Fix: {finding.fix}")
    return "\n".join([*lines, explain(finding.rule)])


def _command(level: str, finding: Finding, verdict: Verdict, title: str, message: str) -> str:
    location = place_of(finding, verdict)
    file = relative(location.file)
    properties = {"title": f"fsdp2: {title}"}
    if file is not None:
        properties = {"file": file, "line": str(location.line), **properties}
    shown_as = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
    return f"::{level} {shown_as}::{_escaped(message[:LONGEST])}"


def _escaped(value: str, further: str = "") -> str:
    """As the runner undoes it: `%`, carriage return and newline, in properties also `:` and `,`; no
    other control character.
    """
    return "".join(
        f"%{ord(c):02X}" if c in "%\r\n" + further else c for c in shown(value, "\r\n\t")
    )


def summary(verdict: Verdict, room: int = SUMMARY) -> str:
    """The report as Markdown of at most `room` bytes.

    What comes from the script stands in code blocks, where nothing is markup.
    """
    marks = {
        "pass": "Passed",
        "fail": "Failed",
        "inconclusive": "Not everything could be checked",
        "error": "An error of fsdp2",
        "no_findings": "No findings in the sources",
    }
    held = verdict.baseline
    blocks = ["\n".join(headline(verdict)), verdict.target.get("command"), verdict.partial]
    blocks += [limits(verdict)]
    blocks += [text.comparison(held, verdict.answer)] if held is not None else []
    blocks += [
        f"{word}: {'; '.join(places)}"
        for word, places in text.judged_or_not(verdict.facts, branches_named(verdict))
    ]
    blocks += [f"{text.SUGGESTED}\n{verdict.suggestion}"] if verdict.suggestion else []
    head = f"## fsdp2: {marks[verdict.answer]}\n\n" + "".join(
        _block(block) for block in blocks if block
    )
    note = "\nThe rest was cut to fit into the summary: `--report json=PATH` has all.\n"
    out, left = "", room - len(note)
    for part in (head, *_parts(verdict)) if left >= 0 else ():
        left -= len(part.encode("utf-8", "backslashreplace"))
        if left < 0:
            return out + note
        out += part
    return out


def _parts(verdict: Verdict) -> Iterator[str]:
    for finding in sorted(
        (f for f in verdict.findings if f.status in ("fail", "error")), key=verdict.stands
    ):
        kind = "a consequence" if finding.consequence else "warns" if finding.warns else "failed"
        kind = "known (in baseline)" if verdict.stands(finding) else kind
        yield f"### `{finding.rule}` {kind}\n\n" + _block("\n".join(lines_of(finding)))
    for reason, rules in text.inconclusive(verdict.findings).items():
        yield f"### Not checked: {', '.join(f'`{rule}`' for rule in rules)}\n\n" + _block(reason)
    if skipped := [f"{item['rule']}: {text.why_skipped(item)}" for item in verdict.skipped]:
        yield "### Skipped\n\n" + _block("\n".join(skipped))
    words = {"pass": "passed", "not_covered": "not covered", "not_applicable": "not applicable"}
    for status, what in words.items():
        if found := [f"{f.rule}: {f.evidence}" for f in verdict.findings if f.status == status]:
            yield (
                f"<details><summary>{count(len(found), 'rule')}"
                f" {what}</summary>\n\n{_block(chr(10).join(found))}</details>\n\n"
            )


def _block(content: str) -> str:
    """A code block that its content cannot end."""
    content = sanitize(content)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", content)), default=0))
    return f"{fence}text\n{content}\n{fence}\n\n"

"""What a terminal shows where every report goes to a file: the first lines of the verdict, and the
first finding.
"""

from collections.abc import Iterator

from ..finding import Finding
from ..verdict import Verdict
from .limits_text import verdict_line
from .locations import steps_to
from .proved import headline
from .sanitize import sanitize
from .text import INDENT, compared, filled, kind, lint_line, place, shortened


def brief(verdict: Verdict) -> str:
    """At most a dozen lines."""
    lines = filled(verdict.partial) if verdict.partial else []
    if verdict.linted:
        lines = filled(lint_line(verdict))
    else:
        for line in headline(verdict) or [verdict_line(verdict)]:
            lines += filled(line, further=INDENT)
    return sanitize("\n".join([*lines, *_first(verdict), *compared(verdict)]))


def _first(verdict: Verdict) -> Iterator[str]:
    """The first failure, else the first reason for which the verdict is inconclusive."""
    unsure = [f for f in verdict.findings if f.status == "inconclusive" and f.required]
    for finding in [*verdict.failures, *unsure][:1]:
        yield shortened(f"{kind(finding, verdict)} {finding.rule}: {finding.evidence}", "")
        yield from _where_and_how(finding)


def _where_and_how(finding: Finding) -> Iterator[str]:
    for step, location in steps_to(finding.location)[:1]:
        yield f"{INDENT}{step:4} {place(location)}"
    if finding.fix:
        yield from filled(finding.fix, f"{INDENT}fix  ")

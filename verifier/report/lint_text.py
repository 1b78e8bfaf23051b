"""The report of `fsdp2 lint`: what is wrong, what was not followed, and one line that counts."""

from __future__ import annotations

from ..verdict import Verdict
from .sanitize import sanitize
from .text import LIMIT, compared, failures
from .tiers import counted, not_followed, number


def render(verdict: Verdict) -> str:
    """The whole report as plain text of at most about 10,000 characters, the count last."""
    text = "\n".join(failures(verdict))
    if len(text) > LIMIT:
        text = text[:LIMIT].rpartition("\n")[0] + "\n... (cut; --report json=PATH has all)\n"
    lines = [text] if text else []
    lines += not_followed(verdict)
    spent = f"{verdict.seconds * 1000:.0f} ms; nothing was run"
    if verdict.partial:
        lines.append(f"{verdict.partial} ({spent})")
    else:
        found = number(len(verdict.findings), "finding") if verdict.findings else "no findings"
        lines.append(f"{found} in {counted(verdict.facts['sources'])} ({spent})")
    if verdict.baseline is not None:
        lines.append(compared(verdict.baseline, verdict.answer))
    return sanitize("\n".join(lines) + "\n")

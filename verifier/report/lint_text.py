"""The report of `fsdp2 lint`: what is wrong, and one line that counts."""

from __future__ import annotations

from ..harmless import harmless
from ..verdict import Verdict
from .text import LIMIT, compared, failures


def render(verdict: Verdict) -> str:
    """The whole report as plain text of at most about 10,000 characters, the count last."""
    text = "\n".join(failures(verdict))
    if len(text) > LIMIT:
        text = text[:LIMIT].rpartition("\n")[0] + "\n... (cut; --report json=PATH has all)\n"
    number, files = len(verdict.findings), verdict.target["files"]
    faults = "1 fault" if number == 1 else f"{number} faults"
    told = f"{faults} in {files} file{'' if files == 1 else 's'}, {verdict.seconds * 1000:.0f} ms; nothing was run"
    if verdict.baseline is not None:
        told += f"\n{compared(verdict.baseline, verdict.answer)}"
    return harmless(f"{text}\n{told}\n" if text else f"{told}\n")

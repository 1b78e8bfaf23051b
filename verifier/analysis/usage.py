"""Whether a script refused its arguments: what argparse, click and their like say before anything is run."""

from __future__ import annotations

import re

from ..trace import Run

USAGE_EXIT = 2
_USAGE = re.compile(r"^\s*usage:", re.IGNORECASE | re.MULTILINE)
_ERROR = re.compile(r"(^|: )error:", re.IGNORECASE)
_LONGEST = 300


def usage_error(run: Run) -> str:
    """The script's own words where every rank exits with status 2 and a usage line before any step; else ""."""
    if run.timed_out or not run.traces or run.steps():
        return ""
    ends = [trace.end for trace in run.traces]
    if any(end is None or end.how != "sys.exit" or end.code != USAGE_EXIT for end in ends):
        return ""
    text = run.stderr.get(run.traces[0].rank, "")
    if not _USAGE.search(text):
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)] or lines[-1:]
    usage = next(line for line in lines if _USAGE.match(line))
    return f"{errors[-1][:_LONGEST]}\n    {usage[:_LONGEST]}"

"""Whether a script rejected its arguments, as argparse and click do before they run anything."""

import re

from ..trace import Run

_USAGE = re.compile(r"^\s*usage:", re.IGNORECASE | re.MULTILINE)
_ERROR = re.compile(r"(^|: )error:", re.IGNORECASE)


def usage_error(run: Run) -> str:
    """The script's own message where every rank exits with status 2 and a usage line before any
    step; else "".
    """
    text = run.stderr.get(run.traces[0].rank, "") if run.traces else ""
    if run.timed_out or run.steps() or not _USAGE.search(text):
        return ""
    if any(t.end is None or t.end.how != "sys.exit" or t.end.code != 2 for t in run.traces):
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)] or lines[-1:]
    usage = next(line for line in lines if _USAGE.match(line))
    return f"{errors[-1][:300]}\n    {usage[:300]}"

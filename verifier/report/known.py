"""Which files `--report FORMAT=PATH` may replace: reports that fsdp2 wrote, in any format."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from ..config.reading import inputs

_SOURCES = (".py", ".pyi")  # never replaced, whatever they hold
# of a verification or `fsdp2 lint`, and of `fsdp2 lint --migrate`
_KEYS = ({"schema", "verdict", "findings"}, {"schema", "kinds", "items"})
_TITLE = re.compile(r"- fsdp2 (report|plan)</title>")
_SUITES = re.compile(r'<testsuites\b[^>]*\bname="fsdp2"')
_HEAD = 100_000  # characters in which the title of a page stands
_TAIL = 30  # lines in which the verdict of a text stands, and its comparison with a baseline
_VERDICT = re.compile(r"^verdict: (pass|fail|inconclusive|error|no_findings)\b", re.MULTILINE)
_ENDINGS = (  # of `fsdp2 lint`, which may be wrapped anywhere
    re.compile(r"\(\d+ ms; nothing was run\)"),
    re.compile(r": nothing to migrate \(.*\); `fsdp2 lint` checks it"),
    re.compile(r"nothing was edited or run; after your edits, in a copy: fsdp2 lint"),
)


def may_be_replaced(path: Path) -> bool:
    """Whether a report may replace this file: an earlier one, or an empty file. Raises OSError."""
    if path.suffix in _SOURCES:
        return False
    try:
        text = inputs.text(path, inputs.REPORT)
    except (inputs.Refused, UnicodeDecodeError):
        return False
    return not text.strip() or is_ours(text)


def is_ours(text: str) -> bool:
    """Whether this is the text of a report, by what every report of its format holds."""
    if text.startswith("{"):
        return _is_json(text)
    if text.startswith(("<?xml", "<!DOCTYPE html>")):
        return bool(_SUITES.search(text[:_HEAD]) or _TITLE.search(text[:_HEAD]))
    tail = "\n".join(text.splitlines()[-_TAIL:])
    joined = " ".join(tail.split())
    return bool(_VERDICT.search(tail)) or any(ending.search(joined) for ending in _ENDINGS)


def _is_json(text: str) -> bool:
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if any(keys <= found.keys() for keys in _KEYS):
        return True
    try:
        return bool(found["runs"][0]["tool"]["driver"]["name"] == "fsdp2")  # SARIF
    except (LookupError, TypeError):
        return False

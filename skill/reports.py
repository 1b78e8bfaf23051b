"""Where the reports of a verdict go: `--report FORMAT[=PATH]`, several at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..verifier.errors import UserError
from .output import log, say

Report = tuple[str, Path | None]
T = TypeVar("T")


def wanted_reports(given: Sequence[str], json: bool, known: Collection[str]) -> list[Report]:
    """(format, path or None for stdout) of each report; text on stdout if none is asked for. Raises UserError."""
    found: list[Report] = []
    for text in [*given, *(["json"] if json else [])] or ["text"]:
        name, equals, path = text.partition("=")
        if name not in known:
            raise UserError(f"--report {text}: unknown format '{name}'; known: {', '.join(sorted(known))}")
        if equals and not path:
            raise UserError(f"--report {text}: a path is missing after '='")
        found.append((name, Path(path) if path else None))
    if sum(path is None for _, path in found) > 1:
        raise UserError("two reports cannot both go to stdout; give one of them a path: --report FORMAT=PATH")
    return found


def write_reports(reports: Sequence[Report], result: T, renderers: Mapping[str, Callable[[T], str]]) -> None:
    """Render and write each report."""
    for name, path in reports:
        text = renderers[name](result)
        if path is None:
            say(text.rstrip("\n"))
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--report {name}={path}: cannot be written: {error.strerror or error}") from None
        log(f"report: {path}")

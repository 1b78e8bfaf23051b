"""Where the reports of a verdict go: `--report FORMAT[=PATH]`, several at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ..verifier.errors import UserError
from .output import log, say

Report = tuple[str, Path | None]
T = TypeVar("T")
PLACE = "{target}"
LINES = ("text", "github")  # formats of which one may follow another on stdout


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


def reports_by_target(reports: Sequence[Report], names: Sequence[str]) -> list[list[Report]]:
    """The reports of each target: its name takes the place of `{target}` in paths. Raises UserError where they would meet."""
    for name, path in reports if len(names) > 1 else ():
        if path is None and name not in LINES:
            raise UserError(
                f"several {name} reports cannot share stdout; write --report {name}=PATH with {PLACE} in PATH, or choose "
                "one target with --target NAME"
            )
        if path is not None and PLACE not in str(path):
            raise UserError(f"--report {name}={path}: several targets need {PLACE} in the path")
    return [
        [(name, Path(str(path).replace(PLACE, target)) if path is not None else None) for name, path in reports]
        for target in names
    ]


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

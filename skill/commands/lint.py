"""`fsdp2 lint PATH...`: the rules that the sources alone can break."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ...verifier.errors import FAIL, PASS
from ..output import Help
from ..reports import wanted_reports, write_reports

EPILOG = """\
Reads the files and what they import from their own folder; runs nothing and imports neither torch nor your code. It speaks only where it
is certain: no hit is no proof, `fsdp2 verify` is. A line is left alone by `# fsdp2: ignore[rule] reason` on it or above it.

examples:
  fsdp2 lint train.py
  fsdp2 lint src/ --skip root-only-wrap
  fsdp2 lint train.py --only checkpoint --json

exit codes: 0 no hit, 1 hits, 2 bad usage, or a file that is not Python.
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "lint",
        help="look for faults in the sources alone, in milliseconds",
        description="Look for FSDP2 faults in Python sources: no torch, no run.",
        epilog=EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="a file, or a folder with all below it")
    parser.add_argument(
        "--only", metavar="RULE", action="append", default=[], help="look for this rule or family only (repeatable)"
    )
    parser.add_argument(
        "--skip", metavar="RULE", action="append", default=[], help="leave out this rule or family (repeatable)"
    )
    parser.add_argument(
        "--report",
        metavar="FORMAT[=PATH]",
        action="append",
        default=[],
        help="text or json, to stdout or a file (repeatable)",
    )
    parser.add_argument("--json", action="store_true", help="the same as --report json")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, write the reports, return 0 or 1."""
    import gc

    from ...verifier.report import json_report, lint_text
    from ...verifier.static.verdict import lint

    gc.set_threshold(50_000)  # a short life: collecting costs more than it frees
    renderers = {"text": lint_text.render, "json": json_report.render}
    reports = wanted_reports(options.report, options.json, renderers)
    command = shlex.join(["fsdp2", "lint", *map(str, options.paths)])
    verdict = lint(options.paths, options.only, options.skip, command)
    write_reports(reports, verdict, renderers)
    return FAIL if verdict.verdict == "fail" else PASS

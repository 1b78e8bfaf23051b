"""`fsdp2 report RULE`: what a maintainer needs to judge a finding, from a JSON report, without code, paths and values of arguments."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from ... import __version__
from ...verifier.errors import PASS, UserError
from ..output import add_command, log, say

EPILOG = """\
It prints all that it would write; --out also writes it. Names of rules, functions and parameters and all numbers stay; source lines, paths
and the values of the script's arguments do not.

example:
  fsdp2 verify train.py --report json=report.json
  fsdp2 report state-same-on-ranks report.json --out finding.json
"""
_RUN = ("role", "world_size", "completed", "exit", "losses", "grad_norms")
_PATH = re.compile(r"(?:~|\.{0,2})?(?:/[\w.@+-]+)+/([\w.@+-]+)")


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = "Collect what is needed to report a finding that you believe to be wrong, or a fault of fsdp2."
    parser = add_command(commands, "report", run, "collect what is needed to report a finding", description, EPILOG)
    parser.add_argument("rule", metavar="RULE", help="the rule whose finding you report")
    parser.add_argument("report", metavar="REPORT", type=Path, help="the JSON report of `fsdp2 verify`")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write it to a new file, too")


def run(options: argparse.Namespace) -> int:
    """Print the bundle, and write it if a file is named."""
    from ...verifier.config.reading.words import similar

    report = _read(options.report)
    findings = [f for f in report["findings"] if f["rule"] == options.rule]
    if not findings:
        near = similar(options.rule, [f["rule"] for f in report["findings"]])
        raise UserError(
            f"{options.report} has no finding of '{options.rule}'{f'; did you mean {near!r}?' if near else ''}"
        )
    text = json.dumps(bundle(report, findings[0]), indent=2) + "\n"
    say(text.rstrip("\n"))
    if options.out is not None:
        try:
            with options.out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"{options.out} exists: name a new file") from None
        log(f"written: {options.out}")
    return PASS


def bundle(report: dict[str, Any], finding: dict[str, Any]) -> dict[str, Any]:
    """One finding with the runs and versions that it comes from, redacted."""
    kept = {key: value for key, value in finding.items() if key not in ("location", "explain", "seconds")}
    place = finding["location"] or {}
    failed = [f["rule"] for f in report["findings"] if f["status"] in ("fail", "error") and f is not finding]
    target = report["target"]
    found = {
        "fsdp2": __version__,
        "environment": report["environment"],
        "finding": {**kept, "line": place.get("line"), "function": place.get("function")},
        "verdict": report["verdict"],
        "other_failures": failed,
        "counts": report["counts"],
        "nproc": target.get("nproc"),
        "reshard_to": target.get("reshard_to"),
        "steps": target.get("steps"),
        "options": sorted({word.split("=")[0] for word in _words(target) if word.startswith("-")}),
        "runs": [{key: run.get(key) for key in _RUN} for run in report["runs"]],
    }
    redacted: dict[str, Any] = json.loads(_PATH.sub(r"\1", json.dumps(found)))
    return redacted


def _words(target: dict[str, Any]) -> list[str]:
    return " ".join(str(target.get(key) or "") for key in ("args", "save_args", "resume_args", "single_args")).split()


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise UserError(f"{path} is no JSON report: {error}") from None
    keys = {"findings", "runs", "target", "environment", "counts", "verdict"}
    if not isinstance(report, dict) or not keys <= report.keys() or not isinstance(report["findings"], list):
        raise UserError(f"{path} is no report of `fsdp2 verify --report json=PATH`")
    return report

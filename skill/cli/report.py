"""`fsdp2 report RULE`: what a maintainer needs to judge a finding, from a JSON report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ... import __version__
from ...verifier.errors import PASS, UserError
from ..output import add_command, log, say

EPILOG = """\
It prints all that it would write; --out also writes it. It holds the finding (status, numbers,
evidence, fix, the number of its line and the name of its function), the versions and the platform,
the names of the script's options, the other rules that failed, and of each run its role, ranks,
exit codes, losses and gradient norms.

Left out are source lines and what else a text quotes as code, folders, the values of the script's
arguments, the machines of --launcher, and, as in every report, what looks like a password, a token
or a key. Names of rules, functions, parameters, files and options stay. Read it before you send
it: the message of an exception that it quotes may say more.

example:
  fsdp2 verify train.py --report json=report.json
  fsdp2 report state-same-on-ranks report.json --out finding.json
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Collect what is needed to report a finding that you believe to be wrong, or a fault of"
        " fsdp2."
    )
    parser = add_command(
        commands, "report", run, "collect what is needed to report a finding", description, EPILOG
    )
    parser.add_argument("rule", metavar="RULE", help="the rule whose finding you report")
    parser.add_argument(
        "report", metavar="REPORT", type=Path, help="the JSON report of `fsdp2 verify`"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write it to a new file, too")


def run(options: argparse.Namespace) -> int:
    """Print the bundle, and write it if a file is named."""
    from ...verifier.config.reading.words import similar
    from ...verifier.report.bundle import bundle

    report = _read(options.report)
    findings = [f for f in report["findings"] if f["rule"] == options.rule]
    if not findings:
        near = similar(options.rule, [f["rule"] for f in report["findings"]])
        raise UserError(
            f"{options.report} has no finding of"
            f" '{options.rule}'{f'; did you mean {near!r}?' if near else ''}"
        )
    try:
        text = json.dumps({"fsdp2": __version__, **bundle(report, findings[0])}, indent=2) + "\n"
    except RecursionError:
        raise UserError(f"{options.report}: not a report of fsdp2: nested too deeply") from None
    say(text.rstrip("\n"))
    if options.out is not None:
        try:
            with options.out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise UserError(f"{options.out} exists: name a new file") from None
        log(f"written: {options.out}")
    return PASS


def _read(path: Path) -> dict[str, Any]:
    """The report. Of one by an earlier version the schema only holds what a baseline needs."""
    from ...verifier.report import baseline

    report = baseline.load(path, option="")
    keys = {"environment": dict, "runs": list, "counts": dict, "verdict": str}
    wrong = [key for key, kind in keys.items() if not isinstance(report.get(key), kind)]
    if wrong or not all(isinstance(run, dict) for run in report["runs"]):
        raise UserError(f"{path}: not a report of fsdp2: {wrong[0] if wrong else 'runs'}")
    return report

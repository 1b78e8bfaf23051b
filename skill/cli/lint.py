"""`fsdp2 lint PATH...`: the rules that the sources alone can break; with `--migrate`, what is not FSDP2 yet."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ...verifier.errors import FAIL, PASS, UserError
from ...verifier.verdict import Verdict
from ..output import Help
from ..reports import HELP, add_options, wanted_reports, write_reports, write_verdict

EPILOG = """\
Reads the files and what they import from their repository (its root, its src/, folders that the source adds to sys.path); runs nothing and
imports neither torch nor your code. It reports only what is certain and names the calls that it could not follow: "no findings" is not a
pass, only `fsdp2 verify` proves. `# fsdp2: ignore[rule] reason` on a line or above it suppresses a finding there.

With --migrate it judges nothing: it lists what a script of one process, of DDP or of FSDP1 must change, each construct with its
counterpart, in the order of work. It edits nothing.

examples:
  fsdp2 lint train.py
  fsdp2 lint src/ --skip root-only-wrap
  fsdp2 lint train.py --only checkpoint --json
  fsdp2 lint src/ --report github --report sarif=lint.sarif
  fsdp2 lint src/ --report json=lint.json, and from then on: fsdp2 lint src/ --baseline lint.json
  fsdp2 lint train_ddp.py --migrate

exit codes: 0 no findings, or nothing to migrate, 1 findings, or something to migrate, 2 bad usage, or a file that is not Python, 4 no
training in any of the files: nothing was checked.
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
    add_options(parser, f"{HELP}; with --migrate: text or json", "an earlier report: exit 1 only on new hits")
    parser.add_argument(
        "--allow-no-training", action="store_true", help="exit 0, not 4, where no file holds training (for pre-commit)"
    )
    parser.add_argument("--migrate", action="store_true", help="list what must change to make it FSDP2")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look, write the reports, return 0, 1 or 4."""
    import gc

    from ...verifier.report import LINT
    from ...verifier.rules.lint import lint

    gc.set_threshold(50_000)  # a short life: collecting costs more than it frees
    if options.migrate:
        return _migrate(options)
    reports = wanted_reports(options.report, options.json, LINT)
    command = shlex.join(["fsdp2", "lint", *map(str, options.paths)])
    verdict = lint(options.paths, options.only, options.skip, command, not options.allow_no_training)
    if options.baseline is not None:
        verdict = _held_against(verdict, options)
    write_verdict(reports, verdict, LINT)
    return verdict.exit_code


def _held_against(verdict: Verdict, options: argparse.Namespace) -> Verdict:
    """The verdict beside that of the earlier report."""
    from ...verifier.report import baseline

    old = baseline.load(options.baseline)
    baseline.must_be_of(options.baseline, old, verdict.target)
    return baseline.held_against(verdict, options.baseline, old)


def _migrate(options: argparse.Namespace) -> int:
    """List the changes; 1 if there are any."""
    from ...verifier.report import migration as report
    from ...verifier.source.migration import migrate

    if options.only or options.skip or options.baseline:
        raise UserError("--migrate judges no rules: leave out --only, --skip and --baseline")
    reports = wanted_reports(options.report, options.json, report.RENDERERS)
    found = migrate(options.paths)
    write_reports(reports, found, report.RENDERERS)
    return FAIL if found.items else PASS

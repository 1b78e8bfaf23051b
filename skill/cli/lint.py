"""`fsdp2 lint PATH...`: faults that the sources alone show; with `--migrate`, what is not FSDP2
yet.
"""

from __future__ import annotations

import argparse
import gc
import shlex
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.errors import FAIL, PASS, UserError
from ..output import add_command
from ..reports import HELP, add_options, wanted_reports, write_reports, write_verdict

if TYPE_CHECKING:
    from ...verifier.config.policy import Checkouts

EPILOG = """\
Reads the files and what they import from their repository (its root, its src/, folders that the
source adds to sys.path); runs nothing and imports neither torch nor your code. It reports only
what is certain and lists the calls that it could not follow: "no findings" is not a pass; only
`fsdp2 verify` runs the script. `# fsdp2: ignore[rule] reason` on a line or above it suppresses a
finding there.

With --migrate it lists what a single-process, DDP or FSDP1 script must change, each construct
with its counterpart, in the order of work. It judges no rules and edits nothing.

examples:
  fsdp2 lint train.py
  fsdp2 lint src/ --skip root-only-wrap
  fsdp2 lint train.py --only checkpoint --json
  fsdp2 lint src/ --report github --report sarif=lint.sarif
  fsdp2 lint src/ --report json=lint.json, and from then on: fsdp2 lint src/ --baseline lint.json
  fsdp2 lint train_ddp.py --migrate

exit codes: 0 no findings, or nothing to migrate, 1 findings, or something to migrate, 2 bad
usage, or a file that is not Python, 4 no training in any of the files: nothing was checked.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    summary = "find faults in the sources alone, in milliseconds"
    parser = add_command(
        commands,
        "lint",
        run,
        summary,
        "Find FSDP2 faults in Python sources: no torch, no run.",
        EPILOG,
    )
    parser.add_argument(
        "paths", metavar="PATH", type=Path, nargs="+", help="a file, or a folder with all below it"
    )
    add_options(
        parser,
        f"{HELP}; with --migrate: text or json",
        "an earlier report: exit 1 only on new findings",
    )
    for name, text in (
        ("--allow-no-training", "exit 0, not 4, where no file holds training (for pre-commit)"),
        ("--migrate", "list what must change to make it FSDP2"),
    ):
        parser.add_argument(name, action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Read the sources, write the reports, return 0, 1 or 4."""
    from ...verifier.report import baseline, renderers
    from ...verifier.rules.lint import lint

    if options.migrate:
        return _migrate(options)
    known = renderers(lint=True, verbose=options.verbose)
    reports = wanted_reports(options.report, options.json, known, options.paths)
    command = shlex.join(["fsdp2", "lint", *map(str, options.paths)])
    trains = not options.allow_no_training
    with _few_collections(), _base_branch(options.policy) as checkouts:
        verdict = lint(options.paths, options.only, options.skip, command, trains, checkouts)
        if options.baseline is not None:
            old = baseline.load(options.baseline)
            baseline.must_be_of(options.baseline, old, verdict.target)
            verdict = baseline.held_against(verdict, options.baseline, old, checkouts)
    write_verdict(reports, verdict, known)
    return verdict.exit_code


def _base_branch(policy: str | None) -> AbstractContextManager[Checkouts | None]:
    if policy is None:
        return nullcontext()
    from ...verifier.integrations.base_branch import base_branch

    return base_branch(policy, Path())


@contextmanager
def _few_collections() -> Iterator[None]:
    """A short life: searching for garbage takes longer than the work itself, and at most about 1 GB
    is kept without it.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(10_000_000)
    try:
        yield
    finally:
        gc.freeze()  # nor is it searched for at the end of the process
        gc.set_threshold(*threshold)


def _migrate(options: argparse.Namespace) -> int:
    """List the changes; 1 if there are any."""
    from ...verifier.report import migration as report
    from ...verifier.report.redacted import redacted
    from ...verifier.source.migration import migrate

    if options.only or options.skip or options.baseline or options.policy:
        raise UserError(
            "--migrate judges no rules: leave out --only, --skip, --baseline and --policy"
        )
    reports = wanted_reports(options.report, options.json, report.RENDERERS, options.paths)
    with _few_collections():
        found = redacted(migrate(options.paths))
    write_reports(reports, found, report.RENDERERS)
    return FAIL if found.items else PASS

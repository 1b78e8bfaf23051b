"""`fsdp2 update`: bring a project up to its spec and to the templates of this version, and keep
every edit.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...verifier.errors import FAIL, PASS
from ...verifier.report.wrapping import table
from ..output import add_command, add_offline, add_set, emit_json, say

if TYPE_CHECKING:
    from ..update import Outcome
    from ..update.project import Project

EXAMPLES = """\
examples:
  fsdp2 update my-run                         after an edit of the spec, or a new version of fsdp2
  fsdp2 update my-run --set train.steps=1000  change one value of the spec
  fsdp2 update my-run --spec other.yaml       another spec
  fsdp2 update my-run --dry-run               what would be done with each file

Each file is merged from three texts: as fsdp2 wrote it (kept in .fsdp2/base), as it is, and as
the spec renders it now. What only you changed stays, what only the spec changed is replaced, and
lines that both changed are marked with <<<<<<< and >>>>>>>: choose one, delete the marks. A file
that you deleted stays deleted. All is written, or nothing.

exit codes: 0 done, 1 something is left for you to do (it is listed), 2 bad usage or bad spec
(nothing is written)
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    summary = "bring a project up to its spec and the templates; your edits stay"
    description = (
        "Bring a project up to its spec and to the templates of this version of fsdp2. Your edits"
        " stay."
    )
    parser = add_command(commands, "update", run, summary, description, EXAMPLES)
    add_project_arguments(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="check and merge everything, and write nothing"
    )


def add_project_arguments(parser: Any) -> None:
    """The arguments of `diff` and `update`: the project and its new spec."""
    parser.add_argument("out", type=Path, metavar="OUT", help="a project that `fsdp2 new` wrote")
    add_set(parser)
    add_offline(parser)
    parser.add_argument(
        "--spec", type=Path, metavar="FILE", help="this spec instead of OUT/spec.yaml"
    )


def versions(found: Project) -> dict[str, str]:
    """Which version of fsdp2 wrote the project, and which one this is."""
    return {"project": found.made.generator, "fsdp2": __version__}


def run(args: argparse.Namespace) -> int:
    """Merge every file, write the result, print what was done; 1 if something is left to do."""
    from .. import update
    from ..update import project

    found = project.compare(args.out, args.spec, args.set, args.offline)
    outcomes = update.plan(found)
    if not args.dry_run:
        update.apply(found, outcomes)
    changed = [outcome for outcome in outcomes if outcome.action != "unchanged"]
    code = FAIL if any(outcome.unresolved for outcome in changed) else PASS
    if args.json:
        files, left = (
            [outcome.to_dict() for outcome in changed],
            [o.file.path for o in changed if o.unresolved],
        )
        about = {"out": str(args.out), "dry_run": args.dry_run, "generator": versions(found)}
        emit_json({**about, "files": files, "open": left})
    else:
        _print(args, found, changed)
    return code


def _print(args: argparse.Namespace, found: Project, changed: list[Outcome]) -> None:
    out = args.out
    left = [outcome for outcome in changed if outcome.unresolved]
    written = any(outcome.content != outcome.file.ours for outcome in changed)
    if not written and not left:
        say(f"{out} is up to date with its spec")
    else:
        made, now = versions(found).values()
        since = f" (from fsdp2 {made} to {now})" if made != now else ""
        say(f"{'would update' if args.dry_run else 'updated'} {out}{since}:")
    rows = []
    for outcome in changed:
        lines = f"line {', '.join(map(str, outcome.lines))}" if outcome.lines else ""
        rows.append(
            (
                outcome.action,
                outcome.file.path,
                ": ".join(part for part in (lines, outcome.note) if part),
            )
        )
    for line in table(rows, "  ", size=10) if rows else ():
        say(line)
    if args.dry_run:
        return
    if any(outcome.lines for outcome in left):
        say(
            "resolve the conflicts: choose one side at each mark, and delete the lines <<<<<<<,"
            " =======, >>>>>>>"
        )
    if written:
        say(f"next:\n  fsdp2 verify {shlex.quote(str(out))}")

"""`fsdp2 update`: bring a project up to its spec and to the templates of today, and keep every edit."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...verifier.errors import FAIL, PASS
from ..output import emit_json, say

if TYPE_CHECKING:
    from ..update import Outcome
    from ..update.project import Project

EXAMPLES = """\
examples:
  fsdp2 update my-run                            after an edit of my-run/spec.yaml, or a new version of fsdp2
  fsdp2 update my-run --set train.steps=1000     change one value of my-run/spec.yaml and all that follows
  fsdp2 update my-run --spec other.yaml          another spec
  fsdp2 update my-run --dry-run                  what would become of each file (`fsdp2 diff my-run` shows the lines)

Each file is merged from three texts: as fsdp2 wrote it (kept in .fsdp2/base), as it is, and as the spec renders it now.
What only you changed stays, what only the spec changed is replaced, and lines that both changed are marked with
<<<<<<< and >>>>>>>: choose, delete the marks, go on. A file that you deleted stays deleted. All is written, or nothing.

exit codes: 0 done, 1 something is left for you to do (it is listed), 2 bad usage or bad spec (nothing is written)
"""


def add_parser(subparsers: Any) -> None:
    """Add `fsdp2 update`."""
    parser = subparsers.add_parser(
        "update",
        help="bring a project up to its spec and the templates; your edits stay",
        description="Bring a project up to its spec and to the templates of this version of fsdp2. Your edits stay.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_project_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check and merge everything, and write nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def add_project_arguments(parser: Any) -> None:
    """What `diff` and `update` alike are told: the project, and what its spec is to say."""
    parser.add_argument("out", type=Path, metavar="OUT", help="a project that `fsdp2 new` wrote")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one value of the spec")
    parser.add_argument("--spec", type=Path, metavar="FILE", help="this spec instead of OUT/spec.yaml")


def versions(found: Project) -> dict[str, str]:
    """Which version of fsdp2 wrote the project, and which one this is."""
    return {"project": found.made.generator, "fsdp2": __version__}


def run(args: argparse.Namespace) -> int:
    """Merge every file, write the result, say what was done."""
    from .. import update
    from ..update import project

    found = project.compare(args.out, args.spec, args.set)
    outcomes = update.plan(found)
    if not args.dry_run:
        update.apply(found, outcomes)
    changed = [outcome for outcome in outcomes if outcome.action != "unchanged"]
    code = FAIL if any(outcome.unresolved for outcome in changed) else PASS
    if args.json:
        emit_json(_document(args, found, changed))
    else:
        _print(args, found, changed)
    return code


def _document(args: argparse.Namespace, found: Project, changed: list[Outcome]) -> dict[str, Any]:
    return {
        "out": str(args.out),
        "dry_run": args.dry_run,
        "generator": versions(found),
        "files": [outcome.to_dict() for outcome in changed],
        "open": [outcome.file.path for outcome in changed if outcome.unresolved],
    }


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
    width = max((len(outcome.file.path) for outcome in changed), default=0)
    for outcome in changed:
        lines = "".join(f"{', ' if number else 'line '}{line}" for number, line in enumerate(outcome.lines))
        note = ": ".join(part for part in (lines, outcome.note) if part)
        say(f"  {outcome.action:<10}  {outcome.file.path:<{width}}  {note}".rstrip())
    if args.dry_run:
        return
    if any(outcome.lines for outcome in left):
        say("solve the conflicts: choose one side at each mark, and delete the lines <<<<<<<, =======, >>>>>>>")
    if written:
        say(f"next:\n  fsdp2 verify {shlex.quote(str(out))}")

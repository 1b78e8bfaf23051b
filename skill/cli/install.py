"""`fsdp2 install`: a copy of the skill where coding agents look for it."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...verifier.errors import FAIL, PASS
from ..output import add_command, emit_json, say

if TYPE_CHECKING:
    from ..installer import Plan

CLIENTS = ("claude", "codex", "cursor", "gemini", "opencode", "copilot", "all")
CHANGED = {
    "texts": "texts that differ",
    "rules_new": "new rules",
    "rules_gone": "rules that are gone",
}
EPILOG = """\
The command is `python FOLDER/skill`. A thin copy (text alone, 0.3 MB) calls the verified-fsdp2 of
its version in that Python, on the path or in the project's .venv; a full one (3 MB) needs only
torch, jinja2, pyyaml and jsonschema there. Without an option: what is there, else thin if
verified-fsdp2 is installed here. Installing again upgrades a copy. A file that you edited is kept
and named (exit 1); --force replaces it. Nothing else in the folder is touched.

examples:
  fsdp2 install                          the two folders that reach all clients, in this project
  fsdp2 install --client claude --user   ~/.claude/skills/verified-fsdp2
  fsdp2 install --client codex --client gemini --dry-run
  fsdp2 install --full                   for machines on which fsdp2 is not installed
  fsdp2 install --check                  in CI: exit 1 if a copy is missing, edited or old
  fsdp2 install --uninstall              remove what was installed in this project, for every client

exit codes: 0 done, 1 something of yours was kept, 2 bad usage, or a place that cannot be written.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Write a lean copy of the skill where coding agents look for skills: all of it, or nothing."
    )
    parser = add_command(
        commands, "install", run, "put the skill where coding agents look", description, EPILOG
    )
    clients = f"{', '.join(CLIENTS)} (repeatable; default: all)"
    parser.add_argument(
        "--client", choices=CLIENTS, metavar="NAME", action="append", default=[], help=clients
    )
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--project", action="store_true", help="in the current folder (the default)")
    scope.add_argument("--user", action="store_true", help="in your home, for all projects")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--thin",
        action="store_true",
        help="only what agents read, and a launcher of the installed fsdp2",
    )
    kind.add_argument(
        "--full", action="store_true", help="with the code: a copy that needs no install"
    )
    for name, text in (
        ("--uninstall", "remove what was installed, and nothing else"),
        ("--check", "write nothing; exit 1 if a folder is not what this version installs"),
        ("--dry-run", "print what would be done, and do nothing"),
        ("--force", "replace or remove files that you edited, too"),
    ):
        parser.add_argument(name, action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Plan for every folder, then do all of it or nothing; 1 if something was left as it is."""
    from .. import installer
    from ..copies import contents

    places = installer.targets(
        options.client or ["all"], options.user, everywhere=options.uninstall
    )
    thin = True if options.thin else False if options.full else None
    if options.uninstall:
        plans = [installer.plan_uninstall(place, options.force) for place in places]
        plans = [plan for plan in plans if plan.action != "absent"]
        files: list[dict[str, bytes]] = [{} for _ in plans]
    else:
        files = [contents.files_for(place.folder, thin) for place in places]
        plans = [
            installer.plan_install(place, one, options.force)
            for place, one in zip(places, files, strict=True)
        ]
    if not options.dry_run and not options.check:
        installer.apply(plans)
    ok = not any(
        plan.kept or plan.action == "foreign" or (options.check and plan.contents) for plan in plans
    )
    shown = [
        _to_dict(plan, one, contents.digest(one)) for plan, one in zip(plans, files, strict=True)
    ]
    if options.json:
        emit_json(
            {
                "ok": ok,
                "dry_run": options.dry_run or options.check,
                "version": __version__,
                "targets": shown,
            }
        )
    else:
        _print(shown, options)
    return PASS if ok else FAIL


def _to_dict(plan: Plan, files: dict[str, bytes], digest: str) -> dict[str, Any]:
    return {
        "folder": str(plan.target.folder),
        "clients": list(plan.target.clients),
        "action": plan.action,
        "previous": plan.previous,
        "files": len(files),
        "bytes": sum(map(len, files.values())),
        "digest": digest,
        **{name: len(getattr(plan, name)) for name in ("new", "replaced", "removed")},
        "changed": plan.changed,
        "kept": plan.kept,
    }


def _print(shown: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if not shown:
        say("nothing is installed here")
    would = "would be " if options.dry_run or options.check else ""
    for one in shown:
        folder = one["folder"]
        size = f"{one['files']} files, {one['bytes'] / 1e6:.1f} MB"
        changes = f"{one['new']} files new, {one['replaced']} replaced, {one['removed']} removed"
        lines = {
            "install": f"{would}installed: {folder} ({size})",
            "upgrade": f"{would}upgraded from {one['previous']}: {folder} ({changes})",
            "none": f"up to date: {folder} ({__version__}, digest {one['digest']})",
            "uninstall": f"{would}removed: {folder} ({one['removed']} files)",
            "foreign": f"not touched, since `fsdp2 install` did not write it: {folder}",
        }
        say(f"{lines[one['action']]}, for {', '.join(one['clients'])}")
        for name, about in CHANGED.items():
            if one["changed"].get(name):
                say(f"  {about}: {', '.join(one['changed'][name])}")
        for path in one["kept"]:
            say(f"  kept, since you edited it: {path}")
    if any(one["kept"] for one in shown):
        say("--force replaces or removes the files that were kept")
    if shown and not options.uninstall and not would:
        say(f"try it: python {shlex.quote(shown[0]['folder'])}/skill doctor")

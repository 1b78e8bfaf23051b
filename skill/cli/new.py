"""`fsdp2 new`: write the training project that a spec describes."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from ..output import emit_json, say

EXAMPLES = """examples:
  fsdp2 new spec.yaml my-run
  fsdp2 new spec.yaml my-run --set model.layers=24 --set train.steps=1000
  fsdp2 new spec.yaml my-run --dry-run       what would be written
  fsdp2 new spec.yaml my-run --force         replace the files of an older scaffold, and no others

To change a project and keep your edits: fsdp2 update my-run
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "new",
        help="write a training project from a spec",
        description="Write a complete FSDP2 training project from a spec. All of it is written, or nothing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("spec", type=Path, metavar="SPEC", help="the spec, a YAML file")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; it must be new or empty")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one value of the spec")
    parser.add_argument("--dry-run", action="store_true", help="check everything and write nothing")
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace the files of a scaffold that is there, edited ones too; it names those",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from .. import scaffold, spec

    loaded = spec.load(args.spec, args.set)
    files = scaffold.render(loaded)
    edited = scaffold.edited(files, args.out) if args.force else []
    if args.dry_run:
        scaffold.check_target(files, args.out, args.force)
    else:
        scaffold.write(files, args.out, args.force)

    ranks = loaded["verify"]["ranks"]
    commands = [
        f"cd {shlex.quote(str(args.out))}",
        "python train.py",
        f"torchrun --standalone --nproc-per-node {ranks} train.py",
        "fsdp2 verify .",
    ]
    if args.json:
        emit_json(
            {
                "out": str(args.out),
                "dry_run": args.dry_run,
                "files": sorted(files),
                "replaced_edits": edited,
                "next": commands,
            }
        )
        return 0
    say(f"would write {args.out}:" if args.dry_run else f"wrote {args.out}:")
    for path, text in files.items():
        say(f"  {path:<20} {text.count(chr(10)):>4} lines")
    if edited:
        say(f"{'would replace' if args.dry_run else 'replaced'} what you had edited: {', '.join(edited)}")
    if not args.dry_run:
        say("next:")
        for command in commands:
            say(f"  {command}")
        if loaded.own_modules:
            say(f"your own {' and '.join(loaded.own_modules)} must be importable: beside train.py, or installed")
    return 0

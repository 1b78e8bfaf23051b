"""`fsdp2 new`: write the training project that a spec describes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..output import (
    add_command,
    add_no_plan,
    add_offline,
    add_set,
    emit_json,
    say,
    say_not_looked_at,
)

if TYPE_CHECKING:
    from ..spec import Spec

EXAMPLES = """examples:
  fsdp2 new spec.yaml my-run
  fsdp2 new spec.yaml my-run --set model.layers=24 --set train.steps=1000
  fsdp2 new spec.yaml my-run --dry-run       list the files, write nothing
  fsdp2 new spec.yaml my-run --offline       write it where the data are not, such as on a laptop
  fsdp2 new spec.yaml my-run --force         replace the files of an older scaffold, and no others

To change a project and keep your edits: fsdp2 update my-run
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Write a complete FSDP2 training project from a spec. All of it is written, or nothing."
    )
    parser = add_command(
        commands, "new", run, "write a training project from a spec", description, EXAMPLES
    )
    parser.add_argument("spec", type=Path, metavar="SPEC", help="the spec, a YAML file")
    parser.add_argument(
        "out", type=Path, metavar="OUT", help="the folder to write; it must be new or empty"
    )
    add_set(parser)
    add_offline(parser)
    add_no_plan(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything and write nothing")
    force = "replace the files of an existing scaffold, edited ones too, and list those"
    parser.add_argument("--force", action="store_true", help=force)


def run(args: argparse.Namespace) -> int:
    """Write the project and print what to run next; returns the exit code."""
    from .. import scaffold, spec
    from ..capacity import made_up_data

    loaded = spec.load(args.spec, args.set, args.offline)
    files = scaffold.render(loaded, args.out)
    edited = scaffold.edited(files, args.out) if args.force else []
    (scaffold.check_target if args.dry_run else scaffold.write)(files, args.out, args.force)
    plan = made_up_data.planned(args.spec, args.set, loaded) if args.plan else None
    commands = _next_commands(args.out, loaded, files)
    if args.json:
        shown = {
            "out": str(args.out),
            "dry_run": args.dry_run,
            "offline": args.offline,
            "files": sorted(files),
            "replaced_edits": edited,
            "next": commands,
        }
        emit_json(shown | ({"plan": plan.to_dict()} if plan is not None else {}))
        return 0
    say(f"would write {args.out}:" if args.dry_run else f"wrote {args.out}:")
    for path, text in files.items():
        say(f"  {path:<20} {text.count(chr(10)):>4} lines")
    if edited:
        say(f"{'would replace' if args.dry_run else 'replaced'} your edits of: {', '.join(edited)}")
    say_not_looked_at(args.offline, loaded.urls)
    if plan is not None:
        for line in plan.lines():
            say(line)
        if plan.refused:
            say(f"what would fit: fsdp2 plan {shlex.quote(str(args.out))} --explore")
    if not args.dry_run:
        where = "next, on this machine (a laptop will do):" if loaded.on_a_laptop else "next:"
        say("\n  ".join([where, *commands]))
        _say_before_they_run(loaded)
    return 0


def _next_commands(out: Path, loaded: Spec, files: Iterable[str]) -> list[str]:
    """What to run in the project, from its first step to its verification."""
    verify = loaded["verify"]
    flags = "".join(f" {flag}" for flag in loaded.verification_flags)
    return [
        f"cd {shlex.quote(str(out))}",
        *["python prepare.py"] * ("prepare.py" in files),
        " ".join(["python train.py", *loaded.small_flags]),
        f"torchrun --standalone --nproc-per-node {verify['nproc']} train.py{flags}",
        "fsdp2 verify .",
    ]


def _say_before_they_run(loaded: Spec) -> None:
    """Print how the verified run differs from the real one, and what must be importable."""
    from ..spec.build import debug_shape
    from ..spec.model import decoder_parameters

    if loaded.scaled:
        mesh = loaded.verification_mesh
        say(
            f"`fsdp2 verify` takes a mesh of {mesh} on {mesh.ranks} ranks: the shape of the"
            " spec's, made smaller"
        )
    if small := loaded["verify"]["model"]:
        count, real = decoder_parameters(debug_shape(small, loaded["model"])), loaded.parameters
        say(
            f"`fsdp2 verify` trains the same code with {count:,} parameters (verify.model), not"
            f" with {real:,}"
        )
    if loaded.own_modules:
        say(
            f"your own {' and '.join(loaded.own_modules)} must be importable: beside train.py,"
            " or installed"
        )

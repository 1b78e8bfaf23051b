"""`fsdp2 convert`: a DDP or FSDP1 script with fully_shard, as far as that is mechanical, verified
against the original.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...verifier.errors import FAIL, PASS, UserError
from ..atomic_write import write_files
from ..output import add_command, emit_json, say

if TYPE_CHECKING:
    from ..convert import Converted

EPILOG = """\
It applies the steps of `fsdp2 lint --migrate` that have one right answer, keeps formatting and
comments, and writes `# fsdp2: todo[rule] what to do` above everything else: it never guesses. A
checkpoint of one file stays one of whole tensors; its optimizer state has names of parameters in
place of numbers. Modules that the script imports are read, not edited. Then it runs `fsdp2 verify
NEW --reference ORIGINAL`. It needs libcst: pip install 'verified-fsdp2[convert]'.

examples:
  fsdp2 convert train_ddp.py -o train_fsdp2.py
  fsdp2 convert train_ddp.py -o train_fsdp2.py -- --config small.yaml  arguments of both
  fsdp2 convert train_ddp.py -o train_fsdp2.py --verify "--nproc 4 --steps 5"  of `verify`
  fsdp2 convert train_fsdp1.py -o train_fsdp2.py --no-verify

exit codes: 0 converted and verified (with --no-verify: nothing is left to do), 1 something is
left to do, or a rule failed, 2 bad usage, 4 something could not be checked.
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Convert a DDP or FSDP1 script to FSDP2 where that is mechanical, mark the rest, and verify"
        " the result."
    )
    parser = add_command(
        commands,
        "convert",
        run,
        "convert a DDP or FSDP1 script, and verify it",
        description,
        EPILOG,
    )
    parser.add_argument(
        "script", metavar="SCRIPT", type=Path, help="the DDP or FSDP1 script; it is not changed"
    )
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        type=Path,
        required=True,
        help="the new script, beside the modules it imports",
    )
    parser.add_argument("--force", action="store_true", help="replace FILE")
    parser.add_argument("--no-verify", action="store_true", help="write FILE and run nothing")
    parser.add_argument(
        "--verify", metavar="'OPTIONS'", default="", help="options of `fsdp2 verify`"
    )
    parser.set_defaults(script_args=[])


def run(options: argparse.Namespace) -> int:
    """Convert, write, verify."""
    out: Path = options.out
    if not options.script.is_file():
        raise UserError(f"{options.script} is not a file")
    if os.path.lexists(out) and not options.force:
        raise UserError(f"{out} exists; choose another file, or --force to replace it")
    if out.is_dir() or options.script.resolve() == out.resolve():
        raise UserError(f"{out} must be another file than the script, and no folder")
    if not out.parent.is_dir():
        raise UserError(f"{out.parent} is not a folder")
    from ..convert import convert

    made = convert(options.script)
    write_files({out.name: made.text.encode()}, out.parent)
    if options.json:
        emit_json(_to_dict(made, out))
    else:
        _print(made, options.script, out)
    if options.no_verify:
        return FAIL if made.todo else PASS
    return max(_verify(options, made.kind), FAIL if made.todo else PASS)


def _verify(options: argparse.Namespace, kind: str) -> int:
    from . import main

    command = ["verify", str(options.out), *shlex.split(options.verify)]
    if kind == "ddp" or _has_gpu():
        command += ["--reference", shlex.join([str(options.script), *options.script_args])]
    else:
        say(
            "without --reference: FSDP1 does not run without GPUs; the new script is compared with"
            " DDP and with one process"
        )
    command += ["--", *options.script_args]
    say(f"\n$ {shlex.join(['fsdp2', *command])}")
    return main(command)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _to_dict(made: Converted, out: Path) -> dict[str, Any]:
    todo = [
        {
            "file": one.file,
            "line": one.line,
            "construct": one.construct,
            "rule": one.rule,
            "text": one.text,
        }
        for one in made.todo
    ]
    done = [{"line": line, "construct": construct} for line, construct in made.done]
    return {"schema": 1, "kind": made.kind, "out": str(out), "done": done, "todo": todo}


def _print(made: Converted, script: Path, out: Path) -> None:
    say(f"{out}: {len(made.done)} constructs of {script} converted, {len(made.todo)} left to do")
    for line, construct in made.done:
        say(f"  {script}:{line}: {construct}")
    for one in made.todo:
        say(f"  todo {one.file}:{one.line}: {one.construct}: {one.text}")

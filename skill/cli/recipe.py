"""`fsdp2 recipe NAME`: one verified piece of a training script, to paste."""

from __future__ import annotations

import argparse
from typing import Any

from ...verifier.report.wrapping import table
from ..output import add_command, add_set, emit_json, say

EXAMPLES = """examples:
  fsdp2 recipe                               the names, and what each piece does
  fsdp2 recipe train-step                    accumulation, a loss over all valid tokens, clipping
  fsdp2 recipe train-step --set train.max_norm=null
  fsdp2 recipe checkpoint --set checkpoint.mode=thread

The options are the keys of a spec (fsdp2 spec explain). Paste the piece, adapt the names, then:
fsdp2 verify SCRIPT
"""


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = (
        "Print one piece of a training script, cut from the templates that make scaffolds."
    )
    parser = add_command(
        commands,
        "recipe",
        run,
        "print one verified piece of a training script",
        description,
        EXAMPLES,
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="which piece; without it, all names"
    )
    add_set(parser, "set a key of the spec (repeatable)")


def run(args: argparse.Namespace) -> int:
    """Print the piece, or the names of all; returns the exit code."""
    from .. import recipes

    if args.name is None:
        known = {name: recipe.about for name, recipe in recipes.RECIPES.items()}
        emit_json(known) if args.json else say("\n".join(table(list(known.items()))))
        return 0
    code = recipes.text(args.name, args.set)
    if args.json:
        recipe = recipes.RECIPES[args.name]
        emit_json(
            {"name": args.name, "about": recipe.about, "rules": list(recipe.rules), "code": code}
        )
    else:
        say(code.rstrip())
    return 0

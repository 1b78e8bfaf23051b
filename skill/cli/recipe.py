"""`fsdp2 recipe NAME`: one proved piece of a training script, to paste."""

from __future__ import annotations

import argparse
from typing import Any

from ..output import emit_json, say

EXAMPLES = """examples:
  fsdp2 recipe                                   the names, and what each piece does
  fsdp2 recipe train-step                        accumulation, a loss over all valid tokens, clipping
  fsdp2 recipe train-step --set train.clip_norm=null
  fsdp2 recipe checkpoint --set checkpoint.mode=thread

The options are the keys of a spec (fsdp2 spec explain). Paste the piece, adapt the names, then: fsdp2 verify SCRIPT
"""


def add_parser(subparsers: Any) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "recipe",
        help="print one proved piece of a training script",
        description="Print one piece of a training script, cut from the templates that make scaffolds.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which piece; without it, all names")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of a spec")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print it; returns the exit code."""
    from .. import recipes

    if args.name is None:
        known = {name: recipe.about for name, recipe in recipes.RECIPES.items()}
        if args.json:
            emit_json(known)
            return 0
        for name, about in known.items():
            say(f"{name:<18}{about}")
        return 0
    code = recipes.text(args.name, args.set)
    if args.json:
        recipe = recipes.RECIPES[args.name]
        emit_json({"name": args.name, "about": recipe.about, "rules": list(recipe.rules), "code": code})
    else:
        say(code.rstrip())
    return 0

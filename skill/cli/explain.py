"""`fsdp2 explain [RULE]`: the page of a rule, or the list of all."""

from __future__ import annotations

import argparse
import difflib

from ...verifier.errors import PASS, UserError
from ..output import emit_json, say


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "explain",
        help="what a rule says, why, and how to fix a fault",
        description="Print the page of a rule; without a name, all rules by family.",
        epilog="example:\n  fsdp2 explain token-mean-of-means",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rule", metavar="RULE", nargs="?", help="a rule's name")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one page or the list."""
    from ...verifier.rules import RULES
    from ...verifier.rules.base import SECTIONS

    if options.rule is None:
        if options.json:
            emit_json([{"rule": n, "family": r.family, "statement": r.page()["Statement"]} for n, r in RULES.items()])
            return PASS
        family = ""
        for name, rule in RULES.items():
            if rule.family != family:
                family = rule.family
                say(f"{family}:")
            say(f"  {name:<36}{rule.page()['Statement']}")
        return PASS
    if options.rule not in RULES:
        near = difflib.get_close_matches(options.rule, RULES, 1)
        hint = f"; did you mean '{near[0]}'?" if near else "; `fsdp2 explain` lists all"
        raise UserError(f"unknown rule '{options.rule}'{hint}")
    rule = RULES[options.rule]
    page = rule.page()
    if options.json:
        emit_json({"rule": rule.name, "family": rule.family, **{key.lower(): text for key, text in page.items()}})
        return PASS
    say(f"{rule.name} ({rule.family})\n\n{page['Statement']}")
    for section in SECTIONS:
        if section in page:
            indent = "    " if section in ("Wrong", "Right") else ""
            body = "\n".join(indent + line for line in page[section].splitlines())
            say(f"\n{section}:\n{body}" if indent else f"\n{section}: {body}")
    return PASS

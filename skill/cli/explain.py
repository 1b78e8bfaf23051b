"""`fsdp2 explain [RULE]`: the docs of a rule, or the list of all rules."""

from __future__ import annotations

import argparse
import difflib
from itertools import groupby
from typing import Any

from ...verifier.errors import PASS, UserError
from ...verifier.report.wrapping import paragraphs, table
from ..output import add_command, emit_json, say


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = "Print the docs of a rule; without a name, all rules by family."
    epilog = "example:\n  fsdp2 explain token-mean-of-means"
    parser = add_command(
        commands, "explain", run, "what a rule checks, why, and the fix", description, epilog
    )
    parser.add_argument("rule", metavar="RULE", nargs="?", help="a rule's name")


def run(options: argparse.Namespace) -> int:
    """Print the docs of one rule or the list."""
    from ...verifier.rules import RULES
    from ...verifier.rules.base import SECTIONS

    if options.rule is None:
        titles = {name: rule.page()["Statement"] for name, rule in RULES.items()}
        if options.json:
            emit_json(
                [{"rule": n, "family": r.family, "statement": titles[n]} for n, r in RULES.items()]
            )
            return PASS
        for family, rules in groupby(RULES, lambda name: RULES[name].family):
            say(f"{family}:")
            say("\n".join(table([(name, titles[name]) for name in rules], "  ", size=36)))
        return PASS
    if options.rule not in RULES:
        near = difflib.get_close_matches(options.rule, RULES, 1)
        hint = f"; did you mean '{near[0]}'?" if near else "; `fsdp2 explain` lists all"
        raise UserError(f"unknown rule '{options.rule}'{hint}")
    rule = RULES[options.rule]
    page = rule.page()
    if options.json:
        emit_json(
            {
                "rule": rule.name,
                "family": rule.family,
                **{key.lower(): text for key, text in page.items()},
            }
        )
        return PASS
    say(paragraphs(f"{rule.name} ({rule.family})\n\n{page['Statement']}"))
    for section in (section for section in SECTIONS if section in page):
        if section in ("Wrong", "Right"):
            code = "\n".join(f"    {line}" for line in page[section].splitlines())
            say(f"\n{section}:\n{code}")
        else:
            say("\n" + paragraphs(f"{section}: {page[section]}"))
    return PASS

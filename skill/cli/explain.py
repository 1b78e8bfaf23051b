"""`fsdp2 explain [RULE]`: the docs of a rule, the list of all rules, or what a rule found in a
report.
"""

from __future__ import annotations

import argparse
import difflib
from itertools import groupby
from pathlib import Path
from typing import Any

from ...verifier.errors import PASS, UserError
from ...verifier.report.wrapping import paragraphs, table
from ..output import add_command, emit_json, say


def add_parser(commands: Any) -> None:
    """Declare the command."""
    description = "Print the docs of a rule; without a name, all rules by family."
    epilog = (
        "examples:\n  fsdp2 explain token-mean-of-means\n  fsdp2 explain matches-ddp --report"
        " report.json   what it found, whole, also as a consequence"
    )
    parser = add_command(
        commands, "explain", run, "what a rule checks, why, and the fix", description, epilog
    )
    parser.add_argument("rule", metavar="RULE", nargs="?", help="a rule's name")
    found = "what the rule found in this JSON report: a consequence as it would be alone"
    parser.add_argument("--report", metavar="REPORT", type=Path, help=found)


def run(options: argparse.Namespace) -> int:
    """Print the docs of one rule or the list."""
    from ...verifier.rules import RULES
    from ...verifier.rules.base import SECTIONS

    if options.rule is None and options.report is not None:
        raise UserError("--report: name the rule, too: fsdp2 explain RULE --report REPORT")
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
    if options.report is not None:
        return _found(options.rule, options.report, options.json)
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


def _found(rule: str, path: Path, as_json: bool) -> int:
    """Print each finding of a rule in a report, with its own evidence, line and fix."""
    from ...verifier.report.baseline import finding_of, load
    from ...verifier.report.sanitize import sanitize
    from ...verifier.report.text import failure

    report = load(path, option="")
    items = [item for item in report["findings"] if item["rule"] == rule]
    if as_json:
        emit_json(items)
        return PASS
    if not items:
        raise UserError(f"{path} has no finding of '{rule}'")
    findings = [finding_of(item) for item in report["findings"]]
    first = [f.rule for f in findings if f.status == "fail" and not (f.consequence or f.warns)]
    for finding in (f for f in findings if f.rule == rule):
        if finding.consequence:
            causes = " or ".join(dict.fromkeys(first))
            say(f"reported as a consequence of {causes}; alone it would be:")
        say(sanitize("\n".join(failure(finding, finding.status.upper().replace("_", " ")))))
    return PASS

"""`references/contract.md`, made from the docs of the rules: `python -m
verified_fsdp2.skill.reference > references/contract.md`.
"""

from __future__ import annotations

from ..verifier.rules import RULES
from ..verifier.rules.base import Rule, SourceRule
from .output import say

HEAD = """\
# The contract: what `fsdp2 verify` checks

Made from the rules' own pages by `make references`; do not edit. \
The page of a rule, with the why, wrong and right code, source and torch
versions, is `fsdp2 explain NAME`.
"""


def contract() -> str:
    """Every rule by family: what it says, and how a fault is fixed."""
    lines, family = [], ""
    for rule in RULES.values():
        if rule.family != family:
            family = rule.family
            lines += [f"\n## {family}\n"]
        lines.append(line(rule))
    return HEAD + "\n".join(lines) + "\n"


def line(rule: Rule) -> str:
    """The line of one rule."""
    page = {key: " ".join(text.split()) for key, text in rule.page().items()}
    found = " (sources only)" if isinstance(rule, SourceRule) else ""
    seen = f" *Seen:* {page['Seen']}" if "Seen" in page else ""
    return f"- **{rule.name}**{found}: {page['Statement']}{seen} *Fix:* {page['Fix']}"


if __name__ == "__main__":
    say(contract().rstrip("\n"))

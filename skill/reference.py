"""`references/contract.md`, made from the pages of the rules: `python -m verified_fsdp2.skill.reference > references/contract.md`."""

from __future__ import annotations

from ..verifier.rules import RULES
from ..verifier.rules.base import Rule
from .output import say

HEAD = """\
# The contract: what `fsdp2 verify` checks

Made from the rules' own pages by `make references`; do not edit. One rule: `fsdp2 explain NAME`. The code blocks share the names of a
small setting: `Decoder` (a model with `blocks`), `shard` (each block, then the root), `model`, `optimizer`, `batch`, `loss_of`, ...

| family | rules |
|---|---|
"""


def contract() -> str:
    """The whole page as Markdown."""
    families: dict[str, list[str]] = {}
    for rule in RULES.values():
        families.setdefault(rule.family, []).append(f"[{rule.name}](#{rule.name})")
    table = "".join(f"| {family} | {', '.join(links)} |\n" for family, links in families.items())
    return HEAD + table + "".join(_section(rule) for rule in RULES.values())


def _section(rule: Rule) -> str:
    page = rule.page()
    flat = {key: " ".join(text.split()) for key, text in page.items()}
    parts = [f"\n## {rule.name}", flat["Statement"], f"**Why.** {flat['Why'][0].upper()}{flat['Why'][1:]}"]
    for key in ("Wrong", "Right"):
        parts += [f"{key}:", f"```python\n{page[key]}\n```"]
    parts += [f"**Mend.** {flat['Mend']}", f"Source: {flat['Source']} torch: {flat['Torch']}"]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    say(contract().rstrip("\n"))

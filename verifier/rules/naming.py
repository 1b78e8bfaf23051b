"""Rules and families by name, as `--only`, `--skip` and a configuration give them."""

from collections.abc import Collection, Iterable

from ..config.reading.words import similar
from ..errors import UserError
from . import RULES
from .policies import SkippedWith


def unknown(name: str) -> str:
    """Why this is not the name of a rule or a family; empty if it is one."""
    known = [*RULES, *dict.fromkeys(rule.family for rule in RULES.values())]
    if name in known:
        return ""
    match = similar(name, known)
    hint = f"did you mean {match!r}?" if match else "`fsdp2 explain` lists them"
    return f"unknown rule or family {name!r}; {hint}"


def is_named(rule: str, names: Collection[str]) -> bool:
    """Whether a rule, or its family, is among these names."""
    return rule in names or RULES[rule].family in names


def is_skipped(rule: str, names: Collection[str]) -> bool:
    """Whether a rule is left out by these names: `checkpoint` leaves out every rule that needs a
    resume, too.
    """
    beside = RULES[rule].policy(SkippedWith)
    with_checkpoints = "checkpoint" in names and RULES[rule].about_checkpoints
    return (
        is_named(rule, names) or with_checkpoints or (beside is not None and beside.family in names)
    )


def left(able: Iterable[str], only: Collection[str], skip: Collection[str]) -> list[str]:
    """Those of the `able` rules that both lists of rules or families leave.

    Raises UserError on an unknown name.
    """
    for name in (*only, *skip):
        if wrong := unknown(name):
            raise UserError(wrong)
    return [
        rule for rule in able if (not only or is_named(rule, only)) and not is_skipped(rule, skip)
    ]

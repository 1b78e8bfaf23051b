"""What the rules find in the windows behind the first steps."""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from ..config.windows import Window
from ..finding import Finding

_STEPS = re.compile(r"\b([Ss]teps?) (\d+)((?:(?:-| to | and |, )\d+)*)")
_AGREE = {"matches-ddp", "matches-single-process"}  # of which one compares a window
_WRONG = ("fail", "error")


def combined(
    findings: Iterable[Finding], shown: Iterable[tuple[Window, list[Finding]]]
) -> list[Finding]:
    """The findings, in which the first failure that a window shows takes the place of what its
    rule has found in the first steps.
    """
    by_rule = {finding.rule: finding for finding in findings}
    for window, own in shown:
        for finding in own:
            known = by_rule.get(finding.rule)
            if finding.status in _WRONG and (known is None or known.status not in _WRONG):
                by_rule[finding.rule] = _in_words(window, finding)
    return list(by_rule.values())


def _in_words(window: Window, finding: Finding) -> Finding:
    """A finding of a window, with the steps as the script counts them."""
    text = f"in steps {window} ({window.reason}): {_counted(finding.evidence, window.first - 1)}"
    return replace(finding, evidence=text)


def not_compared(window: Window, found: Collection[Finding], agreed: Collection[str]) -> str:
    """Why a window is not compared, by what the rules find in it; "" if it is: all oracles can be
    compared that agreed in the first steps, or one if none did.

    `agreed`: the rules that passed there.
    """
    agree = [f for f in found if f.rule in _AGREE]
    if any(f.status in _WRONG for f in found):
        return ""
    unsure = [f for f in agree if f.status == "inconclusive"]
    passed = any(f.status == "pass" for f in agree)
    # What is compared with DDP alone, where one process trains on other samples, shows less than
    # the first line says (exam round 15 rb_03_stale_batch).
    if passed:
        unsure = [f for f in unsure if f.rule in agreed]
    text = next((f"{f.rule}: {f.evidence}" for f in unsure), "")
    return _counted(text, window.first - 1) or ("no oracle was run" if agree and not passed else "")


def _counted(text: str, before: int) -> str:
    """A text in which steps count on from those before the window."""

    def later(match: re.Match[str]) -> str:
        rest = re.sub(r"\d+", lambda digits: str(int(digits[0]) + before), match[3])
        return f"{match[1]} {int(match[2]) + before}{rest}"

    return _STEPS.sub(later, text)
